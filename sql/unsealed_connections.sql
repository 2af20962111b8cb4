/*
Finds connections whose private keys are to be sealed, as unsealed_endpoints.sql finds
endpoints. Zero rows: there is nothing (more).
*/
with sealable as materialized (
  select not exists (
    select from postern.dispatcher d
     where d.stopped_at is null
       and d.heartbeat_at > now() - interval '30 seconds'
       and not d.sealing_keys @> array[@key::text]) as yes
),
found as materialized (
  (select c.id
     from postern.connection c
    where (select yes from sealable)
      and private_key not like 'sealed:v1:%'
      and c.id > @after
    order by c.id
    limit 100)
  union
  (select c.id
     from postern.connection c
    where @all::boolean
      and (select yes from sealable)
      and c.id > @after
    order by c.id
    limit 100)
)
select c.id,
       hashtextextended(c::text, 0)::text as version,
       c.private_key
  from postern.connection c
 where c.id = any (array(select id from found order by id limit 100))
 order by c.id
