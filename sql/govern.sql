/*
Takes the control rows of governed destinations, making those that are missing,
and remembers which it got for the statements that follow in its transaction:
they see everything that earlier holders of the rows committed. One that
another dispatcher holds is left to it, so nobody waits, except for a row that
another is making. With @probing it is endpoints with limits alone, since the ramp
comes after the probes, and of them those that have something due.

One row: the destinations that are held.
*/
with wanted as materialized (
  select distinct w.destination
    from unnest(@destinations::text[]) as w (destination)
   where not @probing::boolean
      or ((select postern.governed(e, null, null) from postern.endpoint e where e.id = postern.endpoint_of(w.destination))
          and exists (select
                        from postern.delivery d
                       where d.status = 'pending'
                         and d.destination = w.destination
                         and d.next_attempt_at <= now()
                         and (d.leased_until is null or d.leased_until < now())
                      offset 0))
),
made as (
  insert into postern.governor (destination)
  select w.destination
    from wanted w
   where not exists (select from postern.governor g where g.destination = w.destination)
   order by w.destination
      on conflict (destination) do nothing
  returning destination
),
found as materialized (
  select destination
    from postern.governor
   where destination = any (array(select w.destination from wanted w))
   order by destination
     for no key update skip locked
),
held as (
  select destination from made
   union all
  select destination from found
)
select set_config('outbox.governed', coalesce(array_agg(destination), '{}')::text, true)
  from held
