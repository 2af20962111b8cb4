/*
Says how many deliveries of each governed destination that this transaction
holds may be claimed now, at most @quotas[i], and leaves it to
claim_governed.sql in a setting of the transaction. With @probing they are to be
claimed through a shut door, by probe.sql.

The cap is the endpoint's max_in_flight or, for @ramp after its breaker closed,
what has grown back of it: 1, 2, 4 … up to 256 in flight, whichever is less.
Leases out are those on the list that still run. For the first 12 s,
longer than a claim may take that began when there was no cap, others are
gathered from the 10,000 oldest that are due; claims take the oldest first.

Tokens fill up by rate_limit a second to rate_burst, by default a second's
worth. Where they are what limits, refill_ms says when there is enough again
for a claim to be worth it: 50 ms' worth, one at least.

A tally of the future is of a clock that was set back since: it is written anew
with the present time, and what it says of leases is gathered again. Otherwise
no token would come until the clock is there once more.

`offset 0` and `= any (array(…))` as in claim.sql: look-ups, no walks. Of the
tally the newest row is read from its end, and the one before it deleted by its
place, so that rows which vacuum cannot remove yet are never stepped over.

One row per destination held; a destination that another dispatcher holds has
none. governed = false: it has no limit any more, and is claimed like others.
*/
with rule as materialized (
  select w.destination,
         w.quota,
         c.place,
         coalesce(c.version, 0) as version,
         coalesce(c.leases, '{}') as leases,
         c.epoch,
         c.since,
         c.gathered_at,
         coalesce(c.refilled_at, now()) as refilled_at,
         coalesce(c.refilled_at > now() + interval '5 s', false) as stepped,
         e.rate_limit,
         coalesce(e.rate_burst, ceil(e.rate_limit)) as burst,
         least(coalesce(e.rate_burst, ceil(e.rate_limit)),
               coalesce(c.tokens, 'infinity') + e.rate_limit * greatest(0, extract(epoch from now() - coalesce(c.refilled_at, now())))) as tokens,
         least(e.max_in_flight, ramp.share) as cap,
         greatest(e.capped_since, case when ramp.share is not null then b.closed_at end) as began,
         coalesce(e.status = 'active', postern.endpoint_of(w.destination) is null)
           and (@probing::boolean or postern.passes(b.door)) as open
    from unnest(@destinations::text[], @quotas::integer[]) as w (destination, quota)
    left join lateral (
           select c.*, c.ctid as place
             from postern.tally c
            where c.destination = w.destination
            order by c.destination desc, c.version desc
            limit 1) c on true
    left join lateral (select * from postern.endpoint e where e.id = postern.endpoint_of(w.destination) offset 0) e on true
    left join lateral (select b as door, b.closed_at from postern.breaker b where b.destination = w.destination offset 0) b on true
   cross join lateral (select postern.ramp_share(b.door, @ramp) as share) ramp
   where w.destination = any (nullif(current_setting('outbox.governed', true), '')::text[])
),
measured as materialized (
  select r.*, must.gather, must.gather or r.stepped as rewrite, live.leases as live
    from rule r
   cross join lateral (
     select r.cap is not null
            and (r.epoch is distinct from r.began
                 or r.stepped
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
current as materialized (
  select m.*,
         case when m.gather and (m.stepped or m.epoch is distinct from m.began) then now() else m.since end as counting_since,
         case when m.gather then now() else m.gathered_at end as last_gathered_at
    from measured m
),
gathered as (
  insert into postern.tally (destination, version, leases, epoch, since, gathered_at, tokens, refilled_at)
  select destination, version + 1, live, began, counting_since, last_gathered_at, tokens,
         greatest(now(), least(refilled_at, now() + interval '1 s'))
    from current
   where rewrite
  returning destination, ctid as place
),
outdated as (
  delete from postern.tally c
   where c.ctid = any (array(select place from current where rewrite))
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
         cap - cardinality(live) as room,
         case when rewrite then (select g.place from gathered g where g.destination = current.destination) else place end as place,
         case when rewrite then version + 1 else version end as version,
         case when gather then began else epoch end as epoch,
         counting_since as since,
         last_gathered_at as gathered_at,
         least(refilled_at, now() + interval '1 s') as refilled_at
    from current
),
told as materialized (
  select set_config('outbox.allowed',
           jsonb_agg(jsonb_build_object(
             'destination', destination, 'allowed', allowed, 'place', place, 'version', version, 'leases', live,
             'epoch', epoch, 'since', since, 'gathered_at', gathered_at, 'tokens', tokens, 'refilled_at', refilled_at))::text,
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
