/*
What is sealed and with which key, how it gets sealed, and the public keys to hand out.
*/

/* ----------------------------------------------------------------- sealing

Counts, by what it is and by the key, the values that dispatchers with sealing keys
seal. Reads all endpoints and sources: for people and postern doctor. */

create view postern.sealing as
select v.what,
       case when v.value like 'sealed:v1:%' then substr(v.value, 11, 8) end as key,
       count(*) as total
  from (select 'secrets of endpoints', unnest(array[e.secret, e.previous_secret])
          from postern.endpoint e
         union all
        select 'user parts of URLs', substring(e.url from '^[^/]*//([^/?#]+)@')
          from postern.endpoint e
         union all
        select 'header values', h.value
          from postern.endpoint e
         cross join lateral jsonb_each_text(e.headers) h
         where jsonb_typeof(e.headers) = 'object'
         union all
        select 'secrets of sources', unnest(array[s.secret, s.previous_secret, s.id_secret])
          from postern.source s
         union all
        select 'private keys of connections', c.private_key
          from postern.connection c) v (what, value)
 where v.value is not null
 group by v.what, case when v.value like 'sealed:v1:%' then substr(v.value, 11, 8) end;

comment on view postern.sealing is
  'How many secrets, header values and user parts of URLs are sealed with which key, and how many are plain text.';
comment on column postern.sealing.what is 'What is counted.';
comment on column postern.sealing.key is 'Id of the key; null: plain text.';
comment on column postern.sealing.total is 'How many there are.';

/* Dispatchers may not change endpoints, sources or connections. These functions put
what is sealed in the place of what was there and do nothing else: each argument is
null, for what stays, or a sealed value where there was a value. They compare the row
with the version that was read, so that no change is lost, and return whether it was
still that one and nobody was changing it. No argument is plain text, so no log has any. */

create function postern.seals(was text, becomes text) returns boolean
language sql immutable parallel safe
return becomes is null or (was is not null and becomes ~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$');

create function postern.seals_url(was text, becomes text) returns boolean
language sql immutable parallel safe
return becomes is null
    or (postern.without_user(was) = postern.without_user(becomes)
        and postern.seals(substring(was from '^[^/]*//([^/?#]+)@'), coalesce(substring(becomes from '^[^/]*//([^/?#]+)@'), '')));

create function postern.seals_headers(was jsonb, becomes jsonb) returns boolean
language sql immutable parallel safe
return case
         when becomes is null then true
         when jsonb_typeof(was) = 'object' and jsonb_typeof(becomes) = 'object'
         then (select coalesce(bool_and(coalesce(o.value = n.value or postern.seals(o.value #>> '{}', n.value #>> '{}'), false) and n.value is not null), true)
                 from jsonb_each(was) o
                 full join jsonb_each(becomes) n on n.key = o.key)
         else false
       end;

create function postern.seal_endpoint(
  id bigint, version text, url text, secret text, previous_secret text, headers jsonb, public_key text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  was postern.endpoint;
begin
  select e.* into was from postern.endpoint e where e.id = $1 and hashtextextended(e::text, 0)::text = $2 for update skip locked;
  if was.id is null then
    return false;
  end if;
  if not (postern.seals_url(was.url, $3) and postern.seals(was.secret, $4) and postern.seals(was.previous_secret, $5)
          and postern.seals_headers(was.headers, $6) and coalesce($7 ~ '^whpk_[A-Za-z0-9+/]{43}=$', true))
  then
    raise exception 'endpoint %: seal_endpoint only seals what is there', $1 using errcode = 'insufficient_privilege';
  end if;
  update postern.endpoint e
     set url             = coalesce($3, e.url),
         secret          = coalesce($4, e.secret),
         previous_secret = coalesce($5, e.previous_secret),
         headers         = coalesce($6, e.headers),
         public_key      = coalesce($7, e.public_key)
   where e.id = $1;
  return true;
end
$$;

create function postern.seal_source(id bigint, version text, secret text, previous_secret text, id_secret text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  was postern.source;
begin
  select s.* into was from postern.source s where s.id = $1 and hashtextextended(s::text, 0)::text = $2 for update skip locked;
  if was.id is null then
    return false;
  end if;
  if not (postern.seals(was.secret, $3) and postern.seals(was.previous_secret, $4) and postern.seals(was.id_secret, $5)) then
    raise exception 'source %: seal_source only seals what is there', $1 using errcode = 'insufficient_privilege';
  end if;
  update postern.source s
     set secret          = coalesce($3, s.secret),
         previous_secret = coalesce($4, s.previous_secret),
         id_secret       = coalesce($5, s.id_secret)
   where s.id = $1;
  return true;
end
$$;

create function postern.seal_connection(id bigint, version text, private_key text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  was postern.connection;
begin
  select c.* into was from postern.connection c where c.id = $1 and hashtextextended(c::text, 0)::text = $2 for update skip locked;
  if was.id is null then
    return false;
  end if;
  if not postern.seals(was.private_key, $3) then
    raise exception 'connection %: seal_connection only seals what is there', $1 using errcode = 'insufficient_privilege';
  end if;
  update postern.connection c
     set private_key = coalesce($3, c.private_key)
   where c.id = $1;
  return true;
end
$$;

revoke execute on function
  postern.seals(text, text), postern.seals_url(text, text), postern.seals_headers(jsonb, jsonb),
  postern.seal_endpoint(bigint, text, text, text, text, jsonb, text), postern.seal_source(bigint, text, text, text, text),
  postern.seal_connection(bigint, text, text)
from public;

comment on function postern.seals(text, text) is 'Whether one value may take the place of another because it is sealed; null: it stays.';
comment on function postern.seals_url(text, text) is 'Whether a URL is another with its user part sealed.';
comment on function postern.seals_headers(jsonb, jsonb) is 'Whether headers are others with values sealed.';
comment on function postern.seal_endpoint(bigint, text, text, text, text, jsonb, text) is
  'For dispatchers: puts sealed values into an endpoint that is still at this version, and its public key.';
comment on function postern.seal_source(bigint, text, text, text, text) is
  'For dispatchers: puts sealed values into a source that is still at this version.';
comment on function postern.seal_connection(bigint, text, text) is
  'For dispatchers: puts a sealed private key into a connection that is still at this version.';

/* -------------------------------------------------------------- public keys

What receivers verify v1a signatures with. They are no secrets; that they come from
us is for whoever hands them out to show. */

create view postern.public_key as
select 'ep_' || e.id as destination, e.tenant, k.key, k.until
  from postern.endpoint e
 cross join lateral (
   values (e.public_key, null::timestamptz),
          (case when e.previous_until > now() then e.previous_public_key end, e.previous_until)
 ) k (key, until)
 where k.key is not null
   and e.status <> 'deleted';

comment on view postern.public_key is
  'Public keys of endpoints, which verify their v1a signatures: postern secrets public writes them into a file.';
comment on column postern.public_key.destination is 'The endpoint: ep_<id>.';
comment on column postern.public_key.tenant is 'Whose endpoint it is.';
comment on column postern.public_key.key is 'whpk_ and the base64 of the key.';
comment on column postern.public_key.until is 'When this one stops signing; null: it is the current one.';
