/*
Finds sources whose secrets are to be sealed, as unsealed_endpoints.sql finds
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
  (select s.id
     from postern.source s
    where (select yes from sealable)
      and (   secret not like 'sealed:v1:%'
           or previous_secret not like 'sealed:v1:%'
           or id_secret not like 'sealed:v1:%')
      and s.id > @after
    order by s.id
    limit 100)
  union
  (select s.id
     from postern.source s
    where @all::boolean
      and (select yes from sealable)
      and s.id > @after
    order by s.id
    limit 100)
)
select s.id,
       hashtextextended(s::text, 0)::text as version,
       s.secret,
       s.previous_secret,
       s.id_secret
  from postern.source s
 where s.id = any (array(select id from found order by id limit 100))
 order by s.id
