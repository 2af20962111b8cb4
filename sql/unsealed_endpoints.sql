/*
Finds endpoints of which something is to be sealed or whose public key is to be
written, after @after and a hundred at a time: with @seal what is plain text, with
@all every one. Plain text waits while some dispatcher that lives does not have the
key @key, since it could not send what is sealed.

Version says which state of the row was read. Zero rows: there is nothing (more).
*/
with sealable as materialized (
  select not exists (
    select from postern.dispatcher d
     where d.stopped_at is null
       and d.heartbeat_at > now() - interval '30 seconds'
       and not d.sealing_keys @> array[@key::text]) as yes
),
found as materialized (
  (select e.id
     from postern.endpoint e
    where @seal::boolean
      and (select yes from sealable)
      and (   secret not like 'sealed:v1:%'
           or previous_secret not like 'sealed:v1:%'
           or url ~ '^[^/]*//(?!sealed:v1:)[^/?#]+@'
           or headers @? '$.* ? (!(@ starts with "sealed:v1:"))')
      and e.id > @after
    order by e.id
    limit 100)
  union
  (select e.id
     from postern.endpoint e
    where public_key is null and secret ~ '(^| )whsk_'
      and e.id > @after
    order by e.id
    limit 100)
  union
  (select e.id
     from postern.endpoint e
    where @all::boolean
      and (select yes from sealable)
      and e.id > @after
    order by e.id
    limit 100)
)
select e.id,
       hashtextextended(e::text, 0)::text as version,
       e.url,
       e.secret,
       e.previous_secret,
       e.headers,
       e.public_key,
       (select yes from sealable) as sealable
  from postern.endpoint e
 where e.id = any (array(select id from found order by id limit 100))
 order by e.id
