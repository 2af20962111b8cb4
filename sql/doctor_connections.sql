/*
What the doctor looks at of each connection: public certificates and the widest
networks, never a private key. One row per connection.
*/
select coalesce('ep_' || c.endpoint_id, 'source ' || s.name) as target,
       c.ca,
       c.certificate,
       exists (select from unnest(c.allow_networks) n where masklen(n) = 0) as everything
  from postern.connection c
  left join postern.source s on s.id = c.source_id
 order by c.id
