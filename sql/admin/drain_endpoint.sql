/*
Takes an endpoint out of service: nothing new is started, and what is in flight
ends by itself. Run it again to see how far that is. Messages go on arriving
for it and wait; postern.resume('ep_<id>') sends them, and
  update postern.message set status = 'cancelled'
   where destination = 'ep_<id>' and status in ('pending', 'held')
gives them up.

  psql -v endpoint=12 -f sql/admin/drain_endpoint.sql
*/
\if :{?endpoint}
\else
  \warn 'usage: psql -v endpoint=<id> -f drain_endpoint.sql'
  \quit
\endif
select count(*) = 0 as unknown, coalesce(bool_or(status = 'active'), false) as active
  from postern.endpoint where id = :endpoint
\gset
\if :unknown
  \warn 'there is no such endpoint'
  \quit
\endif
\if :active
  select postern.pause('ep_' || :endpoint, 'drained by an operator') as paused
  \gset
\endif

select e.id, e.status, e.reason, e.status_since,
       (select count(*) from (select from postern.delivery d
                               where d.destination = 'ep_' || :endpoint and d.status = 'pending' and d.leased_until > now()
                                 and d.next_attempt_at <= now() limit 10000) x) as in_flight,
       b.due, b.waiting, b.counted
  from postern.endpoint e
  left join postern.backlog b on b.destination = 'ep_' || e.id
 where e.id = :endpoint;
