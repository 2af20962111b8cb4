/*
Says how many deliveries of each governed destination that this transaction
holds may be claimed now, at most @quotas[i], and leaves it to claim.sql in a
setting of the transaction.

The cap is the endpoint's max_in_flight or, for @ramp after its breaker closed,
what has grown back of it: 1, 2, 4 … up to 256 in flight, whichever is less.
Leases out are those on the governor's list that still run. For the first 12 s,
longer than a claim may take that began when there was no cap, others are
gathered from the 10,000 oldest that are due; claims take the oldest first.

Tokens fill up by rate_limit a second to rate_burst, by default a second's
worth. Where they are what limits, refill_ms says when there is enough again
for a claim to be worth it: 50 ms' worth, one at least.

`offset 0` and `= any (array(…))` as in claim.sql: look-ups, no walks.

One row per destination held; a destination that another dispatcher holds has
none. governed = false: it has no limit any more, and is claimed like others.
*/
with rule as materialized (
  select w.destination,
         w.quota,
         g.leases,
         g.epoch,
         g.since,
         g.gathered_at,
         e.rate_limit,
         coalesce(e.rate_burst, ceil(e.rate_limit)) as burst,
         least(coalesce(e.rate_burst, ceil(e.rate_limit)),
               coalesce(g.tokens, 'infinity') + e.rate_limit * greatest(0, extract(epoch from now() - g.refilled_at))) as tokens,
         least(e.max_in_flight, ramp.share) as cap,
         greatest(e.capped_since, case when ramp.share is not null then b.closed_at end) as began,
         coalesce(e.status = 'active', postern.endpoint_of(w.destination) is null)
           and postern.passes(b.door) as open
    from unnest(@destinations::text[], @quotas::integer[]) as w (destination, quota)
    join lateral (select * from postern.governor g where g.destination = w.destination offset 0) g on true
    left join lateral (select * from postern.endpoint e where e.id = postern.endpoint_of(w.destination) offset 0) e on true
    left join lateral (select b as door, b.closed_at from postern.breaker b where b.destination = w.destination offset 0) b on true
   cross join lateral (select postern.ramp_share(b.door, @ramp) as share) ramp
   where w.destination = any (nullif(current_setting('outbox.governed', true), '')::text[])
),
measured as materialized (
  select r.*, must.gather, live.leases as live
    from rule r
   cross join lateral (
     select r.cap is not null
            and (r.epoch is distinct from r.began
                 or (r.since > now() - interval '12 s' and r.gathered_at < now() - interval '1 s')) as gather
   ) must
   cross join lateral (
     select coalesce(array_agg(l.id), '{}') as leases
       from (
         select d.id
           from postern.delivery d
          where d.id = any (r.leases)
            and d.leased_until >= now()
          union
         select head.id
           from (
             select d.id, d.leased_until
               from postern.delivery d
              where must.gather
                and d.status = 'pending'
                and d.destination = r.destination
                and d.next_attempt_at <= now()
              order by d.destination, d.next_attempt_at, d.id
              limit 10000
           ) head
          where head.leased_until >= now()
       ) l
   ) live
),
gathered as (
  update postern.governor g
     set leases      = m.live,
         epoch       = m.began,
         since       = case when g.epoch is distinct from m.began then now() else g.since end,
         gathered_at = now()
    from measured m
   where m.gather
     and g.destination = m.destination
     and g.destination = any (array(select destination from measured))
),
allowance as materialized (
  select destination,
         open,
         cap is not null or rate_limit is not null as governed,
         case when open
              then greatest(0, least(quota, cap - cardinality(live), floor(tokens)))::integer
              else 0
         end as allowed,
         quota,
         live,
         tokens,
         burst,
         rate_limit,
         cap - cardinality(live) as room
    from measured
),
told as materialized (
  select set_config('outbox.allowed',
           jsonb_agg(jsonb_build_object('destination', destination, 'allowed', allowed, 'leases', live, 'tokens', tokens))::text,
           true)
    from allowance
)
select a.destination,
       a.open,
       a.governed,
       a.allowed,
       coalesce(a.room <= a.allowed and a.room < a.quota, false) as capped,
       case when floor(a.tokens) <= a.allowed and floor(a.tokens) < a.quota
            then greatest(0, (least(a.burst, greatest(1, a.rate_limit * 0.05)) - (a.tokens - a.allowed)) / a.rate_limit * 1000)
       end as refill_ms
  from allowance a
 cross join told
