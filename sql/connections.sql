/*
How to connect to the targets that are not like all others. With a source it is
for the events that postern receive wrote for that source's target_url, and not
for an endpoint. Applications cannot write outbox.source.

Zero rows: every target is like all others.
*/
select c.id,
       c.endpoint_id,
       s.name as source,
       s.target_url,
       c.origin,
       c.allow_networks::text[] as networks,
       c.allow_http,
       c.allow_ports as ports,
       c.ca,
       c.certificate,
       c.private_key
  from postern.connection c
  left join postern.source s on s.id = c.source_id
 order by c.id
