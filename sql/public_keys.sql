/*
Public keys to hand out, the current one of an endpoint first. Zero rows: no endpoint
has a key pair.
*/
select destination,
       tenant,
       key,
       until
  from postern.public_key
 order by destination, until nulls first
