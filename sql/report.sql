/*
Writes what this process has counted of destinations that fail or are watched,
in rows of its own that no other process writes. `since` is when it began to:
others hear of it then, and report what they have counted too.

Zero rows never: one for each report.
*/
with report as materialized (
  select *
    from unnest(
           @destinations::text[], @generations::bigint[], @successes::integer[], @failures::integer[],
           @unreachable::integer[], @slow::integer[], @stuck::boolean[], @dead::integer[])
         as r (destination, generation, successes, failures, unreachable, slow, stuck, dead)
),
written as (
  insert into postern.evidence as e
         (destination, dispatcher, generation, successes, failures, unreachable, slow, stuck, dead)
  select destination, @dispatcher, generation, successes, failures, unreachable, slow, stuck, dead
    from report
   order by destination
      on conflict (destination, dispatcher) do update
     set generation  = excluded.generation,
         successes   = excluded.successes,
         failures    = excluded.failures,
         unreachable = excluded.unreachable,
         slow        = excluded.slow,
         stuck       = excluded.stuck,
         dead        = excluded.dead,
         as_of       = now(),
         since       = case when e.as_of > now() - interval '15 s' and e.generation = excluded.generation
                            then e.since else now() end
  returning destination, since = now() as fresh, failures > 0 as fails
)
select destination,
       case when fresh and fails and pg_notification_queue_usage() < 0.5
            then pg_notify('postern.breaker', destination) is not null
       end as announced
  from written
