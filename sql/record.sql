/*
Writes what came of many deliveries, in one statement: each request on the
wire gets its attempt row, and so does one that no connection came about for,
and each delivery is deleted, rescheduled, released or made dead. Where all that
is to be said is that they succeeded, finish.sql says it.

A success finishes its delivery whoever owns it by now: the receiver has the
message. Everything else changes only a delivery that this claim still owns.

Numbers are handed out again by a sequence that was set back, and by a standby
that was promoted although it lagged. So every outcome is for the delivery that
has its token, which is random and as old as the row, and for no other that has
got its number since. One whose delivery is not there any more, because it was
finished or taken over, is logged all the same while its message is there, which
message_id tells. Otherwise it is `unmatched`: this database does not know what it
is about, and nothing is written.

An outcome may come @again, after a try whose end nobody knows or that found it
written: what is written stays as it is. While it is still under way this fails with a
unique violation (23505) and is tried again. (`on conflict` would cost every row
a second WAL record.)

As in claim.sql, nothing is joined that could be walked through as a whole
instead of looked up.

What is written was decided by the dispatcher (decide.go): whether there is an
attempt to log (@logged), whether it uses one of the delivery's attempts
(@count_attempts), when the delivery is due again (@delays_ms; null: it keeps its
place), whether it first waits out its lease because the receiver may still be
at work (@await_leases), and whether it counts against its endpoint
(@endpoint_failed, @endpoint_gone).

Rows are locked in the order of their delivery ids. Of the outcomes that were
not delivered it returns the claims that were still ours; one that is missing had
been taken over, cancelled or deleted. Others are unmatched. Other rows tell
endpoints that were disabled: because one is gone, by a request of the generation
that the endpoint still has, or because there was nothing but failures for
@disable_after (null: never), at least five of them, each a tenth of that time
after the one counted before: time alone is no evidence against an endpoint that
gets little. When failing began is kept with the endpoint, and forgotten after
the first success. For a hundredth of that time after a success, failing does not
begin anew, so that an endpoint that fails now and then does not have its row
written all the time. An endpoint that somebody else is changing is left to the
next outcome.
*/
with outcome as materialized (
  select *
    from unnest(
           @delivery_ids::bigint[], @tokens::bigint[], @claim_ids::bigint[], @outbox_ids::bigint[], @message_ids::text[],
           @destinations::text[], @outcomes::text[], @logged::boolean[], @count_attempts::boolean[],
           @numbers::integer[], @ages_ms::double precision[], @durations_ms::real[],
           @statuses::smallint[], @classes::text[], @errors::text[], @responses::text[],
           @reasons::text[], @delays_ms::double precision[], @await_leases::boolean[],
           @endpoint_generations::bigint[], @endpoint_failed::boolean[], @endpoint_gone::boolean[])
         as o (delivery_id, token, claim_id, outbox_id, message_id, destination, outcome, logged, counts_attempt,
               number, age_ms, duration_ms, status, class, error, response, reason, delay_ms, awaits_lease,
               endpoint_generation, endpoint_failed, endpoint_gone)
),
delivered as (
  delete from postern.delivery d
   where d.id = any (array(select delivery_id from outcome where outcome = 'delivered'))
     and d.token = any (array(select token from outcome where outcome = 'delivered'))
  returning d.token
),
changed as (
  update postern.delivery d
     set status          = case o.outcome when 'dead' then 'dead' else d.status end,
         reason          = o.reason,
         attempts        = d.attempts - case when o.counts_attempt then 0 else 1 end,
         next_attempt_at = case when o.awaits_lease then d.leased_until
                                else greatest(d.next_attempt_at, now() + o.delay_ms * interval '1 ms') end,
         scheduled       = d.scheduled or o.awaits_lease or o.delay_ms is not null,
         leased_until    = null,
         claim_id        = null,
         claimed_by      = null,
         last_status     = case when o.logged then o.status else d.last_status end,
         last_error      = case when o.outcome = 'release' or (not o.logged and o.error is null) then d.last_error else o.error end
    from outcome o
   where o.outcome <> 'delivered'
     and d.id = o.delivery_id
     and d.token = o.token
     and d.claim_id = o.claim_id
     and d.claimed_by = @dispatcher
     and d.id = any (array(select delivery_id from outcome where outcome <> 'delivered'))
  returning o.claim_id
),
known as materialized (
  select o.*, its.ours, its.ours or coalesce(its.message_id = o.message_id, false) as matched
    from outcome o
   cross join lateral (
     select mine.ours,
            case when not mine.ours then (select m.message_id from postern.outbox m where m.id = o.outbox_id) end as message_id
       from (
         select case o.outcome
                  when 'delivered' then o.token = any (array(select delivered.token from delivered))
                  else o.claim_id = any (array(select changed.claim_id from changed))
                end as ours) mine
   ) its
),
logged as (
  insert into postern.attempt
         (claim_id, delivery_id, outbox_id, started_at, dispatcher, number, duration_ms,
          status, outcome, destination, class, error, response)
  select claim_id, delivery_id, outbox_id, now() - age_ms * interval '1 ms', @dispatcher, number, duration_ms,
         status, outcome, destination, class, error, response
    from known k
   where logged
     and matched
     and ((ours and not @again::boolean)
          or (select a.claim_id
                from postern.attempt a
               where a.outbox_id = k.outbox_id and a.claim_id = k.claim_id) is null)
),
heard as materialized (
  select postern.endpoint_of(destination) as endpoint_id,
         bool_or(outcome = 'delivered') as delivered,
         bool_or(endpoint_failed) as failed,
         max(endpoint_generation) filter (where endpoint_gone) as gone
    from known
   where endpoint_generation is not null
     and matched
   group by destination
),
judged as materialized (
  select e.id,
         h.delivered,
         its.counts,
         case when e.status <> 'active' then null
              when h.gone = e.generation then 'gone'
              when h.failed and not h.delivered
               and e.failing_since <= now() - @disable_after::interval
               and e.failing_times + its.counts::integer >= 5 then 'failing'
         end as disable
    from heard h
    join postern.endpoint e on e.id = h.endpoint_id
   cross join lateral (
     select case
              when not h.failed or h.delivered then false
              when e.failing_since is null then coalesce(e.recovered_at <= now() - coalesce(@disable_after, interval '5 days') / 100, true)
              else coalesce(e.failing_at <= now() - coalesce(@disable_after, interval '5 days') / 10, true)
            end as counts
   ) its
   where e.id = any (array(select endpoint_id from heard))
     and ((e.status = 'active' and h.gone = e.generation)
       or (h.failed and not h.delivered
           and (its.counts
             or (e.status = 'active' and e.failing_times >= 5 and e.failing_since <= now() - @disable_after)))
       or (h.delivered and e.failing_since is not null))
   order by e.id
     for no key update of e skip locked
),
disabled as (
  update postern.endpoint e
     set status        = case when j.disable is not null then 'disabled' else e.status end,
         reason        = coalesce(j.disable, e.reason),
         failing_since = case when j.delivered then null else coalesce(e.failing_since, now()) end,
         failing_times = case when j.delivered then 0 else e.failing_times + j.counts::integer end,
         failing_at    = case when j.delivered then null when j.counts then now() else e.failing_at end,
         recovered_at  = case when j.delivered then now() else e.recovered_at end
    from judged j
   where e.id = j.id
     and e.id = any (array(select judged.id from judged))
  returning e.id, j.disable
)
select claim_id, false as unmatched, null::bigint as endpoint_id, null as disabled from changed
 union all
select claim_id, true, null, null from known where not matched
 union all
select null, false, id, disable from disabled where disable is not null
