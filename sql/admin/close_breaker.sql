/*
Sends to a destination again, whatever stopped it. If it still fails, its
breaker opens again by itself.

  psql -v destination=https://example.com -f sql/admin/close_breaker.sql
*/
\if :{?destination}
\else
  \warn 'usage: psql -v destination=<origin or ep_id> -f close_breaker.sql'
  \quit
\endif
select postern.close_breaker(:'destination') as closed
\gset
select destination, state, forced, reason from postern.breaker_status where destination = :'destination';
