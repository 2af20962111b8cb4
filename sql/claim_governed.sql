/*
claim.sql for governed destinations, whose leases or claims are counted over
all dispatchers: at most what allow.sql has said in the same transaction, in
which govern.sql holds their control rows. What it claims is added to their
tallies. Of a destination that is not held, or not governed any more, it claims
nothing.

All else, and the columns, as in claim.sql.
*/
with house as materialized (
  select set_config('synchronous_commit', 'off', true),
         coalesce((select postern.passes(g) or (g.forced is null and g.probe_by = @dispatcher and g.probe_until > now())
                     from postern.breaker g
                    where g.destination = 'database'), true) as open
),
allowance as materialized (
  select a.*
    from jsonb_to_recordset(nullif(current_setting('outbox.allowed', true), '')::jsonb)
         as a (destination text, allowed integer, place tid, version bigint, leases bigint[], epoch timestamptz, since timestamptz,
               gathered_at timestamptz, tokens double precision, refilled_at timestamptz)
),
wanted as materialized (
  select w.destination,
         a.allowed,
         case when w.floor_at > now() - interval '2 s' then w.floor_at - interval '500 ms' else w.floor_at end as floor_at,
         w.floor_id,
         least(now(), w.until) as until,
         (b.breaker).generation
    from unnest(@destinations::text[], @floors_at::timestamptz[], @floors_id::bigint[], @untils::timestamptz[])
         as w (destination, floor_at, floor_id, until)
   cross join house
    join allowance a on a.destination = w.destination
   cross join lateral (select postern.endpoint_of(w.destination) as endpoint_id offset 0) its
    left join lateral (select b as breaker from postern.breaker b where b.destination = w.destination offset 0) b on true
    left join lateral (select e as endpoint from postern.endpoint e where e.id = its.endpoint_id offset 0) e on true
   where house.open
     and postern.passes(b.breaker)
     and coalesce((e.endpoint).status = 'active', its.endpoint_id is null)
     and postern.governed(e.endpoint, b.breaker, @ramp)
),
due as materialized (
  select picked.place, picked.id, picked.lapsed
    from wanted w
   cross join lateral (
     select d.ctid as place, d.id, d.leased_until is not null as lapsed
       from postern.delivery d
      where d.status = 'pending'
        and d.destination = w.destination
        and (d.next_attempt_at, d.id) > (w.floor_at, w.floor_id)
        and d.next_attempt_at <= w.until
        and (d.leased_until is null
             or (d.leased_until < now()
                 and (d.leased_until < (select coalesce(min(k.unrecorded_since), 'infinity')
                                        from postern.dispatcher k
                                       where k.state = 'running' and k.heartbeat_at > now() - interval '15 s')
                      or d.claimed_by <> all (array(select k.id
                                                    from postern.dispatcher k
                                                   where k.state = 'running' and k.heartbeat_at > now() - interval '15 s'
                                                     and k.unrecorded_since is not null)))))
      order by d.destination, d.next_attempt_at, d.id
      limit w.allowed
        for update skip locked
   ) picked
),
claimed as (
  update postern.delivery d
     set claim_id     = @claim::bigint # d.token,
         claimed_by   = @dispatcher,
         leased_until = now() + coalesce((select e.timeout from postern.endpoint e where e.id = d.endpoint_id), @timeout::interval) + @margin::interval,
         attempts     = least(d.attempts, 1000000) + 1
   where d.ctid = any (array(select due.place from due))
  returning d.id, d.token, d.message_hash, d.claim_id, d.outbox_id, d.endpoint_id, d.destination, d.next_attempt_at, d.attempts
),
charged as (
  insert into postern.tally (destination, version, leases, epoch, since, gathered_at, tokens, refilled_at)
  select a.destination, a.version + 1, a.leases || c.ids, a.epoch, a.since, a.gathered_at, a.tokens - c.n,
         greatest(now(), least(a.refilled_at, now() + interval '1 s'))
    from allowance a
    join (select destination, array_agg(id) as ids, count(*) as n from claimed group by destination) c
      on c.destination = a.destination
),
outdated as (
  delete from postern.tally c
   where c.ctid = any (array(select a.place from allowance a where a.destination in (select destination from claimed)))
)
select c.id,
       c.token,
       c.claim_id,
       c.outbox_id,
       c.endpoint_id,
       c.destination,
       c.next_attempt_at,
       c.attempts,
       c.id = any (array(select due.id from due where due.lapsed)) as lapsed,
       coalesce((select w.generation from wanted w where w.destination = c.destination limit 1), 0) as generation,
       o.message_id,
       case when octet_length(o.tenant) <= 255 then o.tenant end as tenant,
       case when isfinite(o.created_at) then o.created_at end as created_at,
       o.event_type,
       o.content_type,
       octet_length(o.payload) as payload_bytes,
       case when octet_length(o.payload) <= @inline then o.payload end as payload,
       o.headers,
       o.source,
       case when o.source is not null then o.event_id end as event_id,
       coalesce(e.url, o.target_url) as url,
       coalesce(o.max_attempts, e.max_attempts) as max_attempts,
       o.expires_at <= now() as expired,
       e.status as endpoint_status,
       e.generation as endpoint_generation,
       e.failing_since is not null as failing,
       e.style,
       e.secret,
       case when e.previous_until > now() then e.previous_secret end as previous_secret,
       e.headers as endpoint_headers,
       1000 * extract(epoch from e.timeout)::double precision as timeout_ms,
       1000 * extract(epoch from e.backoff_base)::double precision as backoff_base_ms,
       1000 * extract(epoch from e.backoff_cap)::double precision as backoff_cap_ms,
       e.permanent_codes
  from claimed c
  left join lateral (
    select *
      from postern.outbox o
     where o.id = c.outbox_id
       and octet_length(o.message_id) <= 64
       and octet_length(o.event_type) <= 255
       and octet_length(o.payload) <= 1048576
       and octet_length(o.content_type) <= 255
       and case when pg_column_size(o.headers) <= 32768 then octet_length(o.headers::text) <= 16384 else o.headers is null end
       and coalesce(octet_length(o.target_url) <= 8192, true)
       and coalesce(hashtextextended(o.message_id, 0) = c.message_hash, true)
    offset 0) o on true
  left join lateral (select * from postern.endpoint e where e.id = c.endpoint_id offset 0) e on true
