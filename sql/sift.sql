/*
Finds those of the deliveries @ids, which have the @tokens, that somebody else has locked, without
waiting for them. Its own locks end with it. Zero rows: all are free, or gone.
*/
with free as materialized (
  select d.id
    from postern.delivery d
   where d.id = any (@ids::bigint[])
     and d.token = any (@tokens::bigint[])
   order by d.id
     for update skip locked
)
select d.id
  from postern.delivery d
 where d.id = any (@ids::bigint[])
   and d.token = any (@tokens::bigint[])
   and d.id not in (select free.id from free)
