/*
Stops sending to a destination, without touching a message or using an attempt,
until close_breaker.sql, or for so long.

  psql -v destination=https://example.com -v reason='their maintenance' -f sql/admin/open_breaker.sql
  psql -v destination=ep_12 -v for='2 hours' -f sql/admin/open_breaker.sql
*/
\if :{?destination}
\else
  \warn 'usage: psql -v destination=<origin or ep_id> [-v reason=…] [-v for=…] -f open_breaker.sql'
  \quit
\endif
\if :{?reason}
\else
  \set reason 'by an operator'
\endif
\if :{?for}
  select postern.open_breaker(:'destination', :'reason', :'for'::interval) as opened
  \gset
\else
  select postern.open_breaker(:'destination', :'reason') as opened
  \gset
\endif
select destination, state, forced, forced_until, reason from postern.breaker_status where destination = :'destination';
