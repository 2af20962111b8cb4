/*
Takes up to @quotas[i] due deliveries of @destinations[i], oldest first, and
leases each for its own timeout and then some. Using up the attempt here is
what makes a killed process visible: the attempt is given back where no
request was sent. A row has `lapsed` when whoever claimed it before has never
said what came of it.

A lease that has run out is left to whoever has it while he lives and has not
been able to record what he knew by then, as when a lock on the table outlasts
the lease: what he knows may well be that the receiver has the message.

@floors_at and @floors_id say where live rows of the destination began when
last seen, so that dead index entries before them, which vacuum cannot free
while some transaction keeps its snapshot, are not stepped over again. (The rows
must be compared without the destination: with it, the floor would only be a
filter beside the equality, and a bound at the end would not end the scan before
the next destination.) Where that was just now, half a second
more is looked at, for transactions that commit in another order than they began
in. @untils say where to end: what was found before the floor is claimed without
stepping over the dead entries between.

While the database's own breaker is open nobody claims but the one that tries
whether it can be closed. Other doors are checked once more, since the list of
destinations may be older than an operator's UPDATE. Governed destinations,
whose claims are counted over all dispatchers, are left to claim_governed.sql.

Rows of one statement never come back twice and never exceed the quota: the
limit works inside a materialized step, and skip locked leaves a row that
another process is claiming. What is locked is then found again by its place,
which costs less than its id. (A row that somebody else changed between this
statement's beginning and its lock, and that is due all the same, has a place
that this statement cannot see yet. It is left to the next scan of find.sql, as
one is that was locked.)

A delivery whose message is gone brings none, also when another one has got its
number since: of the message that it was written for it knows a hash of the
message_id.

What somebody wrote into a row by hand must not fail or delay the claim of all
others: a created_at that is no time, attempts beyond what an integer holds, text
longer than the rules of check_message() allow, which a session that fires no
triggers may write. A message with such text comes back without its columns, as
one that was deleted does; over_long.sql tells the two apart. The lengths of text
and the stored size of jsonb are read without reading the value (0.2 ms for 60 MB).
What comes from the endpoint is bounded by its CHECKs.

Rows come in no order. Zero rows: nothing due is free.

The commit does not wait for the disk: a claim lost in a crash is only claimed
again.

The plan is kept for as long as the session lasts and may have been made while
the tables were empty: `= any (array(…))` and `offset 0` leave it no choice but
to look rows up, where a join could have become a walk through all of them.
*/
with house as materialized (
  select set_config('synchronous_commit', 'off', true),
         coalesce((select postern.passes(g) or (g.forced is null and g.probe_by = @dispatcher and g.probe_until > now())
                     from postern.breaker g
                    where g.destination = 'database'), true) as open
),
wanted as materialized (
  select w.destination,
         w.quota,
         case when w.floor_at > now() - interval '2 s' then w.floor_at - interval '500 ms' else w.floor_at end as floor_at,
         w.floor_id,
         least(now(), w.until) as until,
         (b.breaker).generation
    from unnest(@destinations::text[], @quotas::integer[], @floors_at::timestamptz[], @floors_id::bigint[], @untils::timestamptz[])
         as w (destination, quota, floor_at, floor_id, until)
   cross join house
   cross join lateral (select postern.endpoint_of(w.destination) as endpoint_id offset 0) its
    left join lateral (select b as breaker from postern.breaker b where b.destination = w.destination offset 0) b on true
    left join lateral (select e as endpoint from postern.endpoint e where e.id = its.endpoint_id offset 0) e on true
   where house.open
     and postern.passes(b.breaker)
     and coalesce((e.endpoint).status = 'active', its.endpoint_id is null)
     and not postern.governed(e.endpoint, b.breaker, @ramp)
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
      limit w.quota
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
