/*
Reads the sources that are to be served. Zero rows: none is. A previous secret
is one while it is valid.
*/
select
  id,
  name,
  path,
  scheme,
  secret,
  case when previous_until > now() then previous_secret end as previous_secret,
  id_secret,
  coalesce(1000 * extract(epoch from tolerance)::double precision, 0) as tolerance_ms,
  signature_header,
  signature_prefix,
  signature_encoding,
  id_from,
  type_from,
  event_type,
  target_url,
  max_body
from postern.source
where status = 'active'
order by id
