/*
Which keys what is sealed was sealed with. Zero rows: nothing is sealed.
*/
select what,
       key,
       total
  from postern.sealing
 where key is not null
 order by key, what
