/*
Writes the successes among what came of many deliveries, which are most of
them: each gets its attempt row and is deleted. Whoever owns it by now: the
receiver has the message. All other outcomes, and a success of an endpoint that
had been failing, are for record.sql.

@again is as in record.sql. Zero rows, always.
*/
with logged as (
  insert into postern.attempt
         (claim_id, delivery_id, outbox_id, started_at, dispatcher, number, duration_ms,
          status, outcome, destination, response)
  select claim_id, delivery_id, outbox_id, now() - age_ms * interval '1 ms', @dispatcher, number, duration_ms,
         status, 'delivered', destination, response
    from unnest(
           @claim_ids::bigint[], @delivery_ids::bigint[], @outbox_ids::bigint[], @ages_ms::double precision[],
           @numbers::integer[], @durations_ms::real[], @statuses::smallint[], @destinations::text[], @responses::text[])
         as o (claim_id, delivery_id, outbox_id, age_ms, number, duration_ms, status, destination, response)
   where not @again::boolean
      or (select a.claim_id
            from postern.attempt a
           where a.outbox_id = o.outbox_id and a.claim_id = o.claim_id) is null
)
delete from postern.delivery d
 where d.id = any (@delivery_ids::bigint[])
