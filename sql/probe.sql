/*
Wins the right to probe those of @destinations whose breakers have been open
long enough, and claims one delivery of each: of the hundred that are due the
longest, one with the fewest attempts, so that no message is probed to death
and one that is bad by itself does not keep the door shut.

Who holds the probe holds it until probe_until. Whatever becomes of him, another
takes it over then, in a new generation, and his result changes nothing.
Nothing is leased where nothing is due, or all of it is locked by others, for
whom it does not wait. The first probes of an outage get half
the timeout; a receiver that is slow but there is not shut out for it for long.

Destinations with limits are probed within them, in the transaction in which
govern.sql holds their control rows and allow.sql has said that one more may go;
the probe is counted like any other claim.

As in claim.sql, the plan may have been made while the tables were empty: rows are
looked up, never walked through, however many are parked behind the door.

Columns as of claim.sql. Zero rows: nothing to probe, or another does.
*/
with allowance as materialized (
  select a.*
    from jsonb_to_recordset(nullif(current_setting('outbox.allowed', true), '')::jsonb)
         as a (destination text, allowed integer, place tid, version bigint, leases bigint[], epoch timestamptz, since timestamptz,
               gathered_at timestamptz, tokens double precision, refilled_at timestamptz)
),
door as materialized (
  select b.destination, case when b.trips > 1 then 1 else 2 end as patience
    from postern.breaker b
    left join lateral (
           select e.status, postern.governed(e, null, null) as governed
             from postern.endpoint e
            where e.id = postern.endpoint_of(b.destination)
           offset 0) e on true
   cross join lateral (
     select from postern.delivery d
      where d.status = 'pending'
        and d.destination = b.destination
        and d.next_attempt_at <= now()
        and (d.leased_until is null or d.leased_until < now())
      order by d.destination, d.next_attempt_at, d.id
      limit 1
   ) due
    left join postern.breaker g on g.destination = 'database'
   where b.destination = any (@destinations::text[])
     and b.state in ('open', 'half_open')
     and postern.passes(g)
     and (b.forced is null or b.forced_until <= now())
     and b.retry_at <= now()
     and coalesce(b.probe_until <= now(), true)
     and coalesce(b.hold_until <= now(), true)
     and coalesce(e.status, 'active') = 'active'
     and (e.governed is not true
          or exists (select from allowance a where a.destination = b.destination and a.allowed > 0))
   order by b.state, b.retry_at -- half_open: the first probe went well, or the prober is gone
   limit @quota
     for update of b skip locked
),
due as materialized (
  select picked.id, picked.lapsed, door.patience
    from door
   cross join lateral (
     select d.id, d.leased_until is not null as lapsed
       from postern.delivery d
      where d.id = any (array(
              select h.id
                from postern.delivery h
               where h.status = 'pending'
                 and h.destination = door.destination
                 and h.next_attempt_at <= now()
                 and (h.leased_until is null
                      or (h.leased_until < now()
                          and (h.leased_until < (select coalesce(min(k.unrecorded_since), 'infinity')
                                                 from postern.dispatcher k
                                                where k.state = 'running' and k.heartbeat_at > now() - interval '15 s')
                               or h.claimed_by <> all (array(select k.id
                                                             from postern.dispatcher k
                                                            where k.state = 'running' and k.heartbeat_at > now() - interval '15 s'
                                                              and k.unrecorded_since is not null)))))
               order by h.destination, h.next_attempt_at, h.id
               limit 100))
        and case d.status when 'pending' then coalesce(d.leased_until < now(), true) end
      order by d.attempts, d.next_attempt_at, d.id
      limit 1
        for update skip locked
   ) picked
),
claimed as (
  update postern.delivery d
     set claim_id     = @claim::bigint # d.token,
         claimed_by   = @dispatcher,
         leased_until = now() + @margin::interval
                        + coalesce((select e.timeout from postern.endpoint e where e.id = d.endpoint_id), @timeout::interval)
                        / (select due.patience from due where due.id = d.id),
         attempts     = least(d.attempts, 1000000) + 1
   where d.id = any (array(select due.id from due))
  returning d.id, d.token, d.message_hash, d.claim_id, d.outbox_id, d.endpoint_id, d.destination, d.next_attempt_at, d.attempts, d.leased_until
),
charged as (
  insert into postern.tally (destination, version, leases, epoch, since, gathered_at, tokens, refilled_at)
  select a.destination, a.version + 1, a.leases || c.id, a.epoch, a.since, a.gathered_at, a.tokens - 1,
         greatest(now(), least(a.refilled_at, now() + interval '1 s'))
    from allowance a
    join claimed c on c.destination = a.destination
),
outdated as (
  delete from postern.tally c
   where c.ctid = any (array(select a.place from allowance a where a.destination in (select destination from claimed)))
),
leased as (
  update postern.breaker b
     set state       = 'half_open',
         generation  = b.generation + 1,
         probe_by    = @dispatcher,
         probe_until = c.leased_until
    from claimed c
   where b.destination = any (array(select claimed.destination from claimed))
     and b.destination = c.destination
  returning b.destination, b.generation
)
select c.id,
       c.token,
       c.claim_id,
       c.outbox_id,
       c.endpoint_id,
       c.destination,
       c.next_attempt_at,
       c.attempts,
       due.lapsed,
       l.generation,
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
       1000 * extract(epoch from coalesce(e.timeout, @timeout::interval) / due.patience)::double precision as timeout_ms,
       1000 * extract(epoch from e.backoff_base)::double precision as backoff_base_ms,
       1000 * extract(epoch from e.backoff_cap)::double precision as backoff_cap_ms,
       e.permanent_codes
  from claimed c
  join due on due.id = c.id
  join leased l on l.destination = c.destination
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
