/*
Writes the successes among what came of many deliveries, which are most of
them: each gets its attempt row and is deleted. Whoever owns it by now: the
receiver has the message. All other outcomes, and a success of an endpoint that
had been failing, are for record.sql.

A number may have been handed out again since, to another delivery: by a
sequence that was set back, or on a standby that was promoted although it lagged.
So it is deleted only with the token that it got when it was written. (A token is
random: whether it belongs to this number or to another of the same batch need
not be asked.)

Returns the tokens of those that are not there any more: they were finished or
deleted by somebody else, or by an earlier try whose end nobody knows. They are
for record.sql too. Zero rows: all were there.
*/
with finished as (
  delete from postern.delivery d
   where d.id = any (@delivery_ids::bigint[])
     and d.token = any (@tokens::bigint[])
  returning d.token
),
logged as (
  insert into postern.attempt
         (claim_id, delivery_id, outbox_id, started_at, dispatcher, number, duration_ms,
          status, outcome, destination, response)
  select claim_id, delivery_id, outbox_id, now() - age_ms * interval '1 ms', @dispatcher, number, duration_ms,
         status, 'delivered', destination, response
    from unnest(
           @claim_ids::bigint[], @delivery_ids::bigint[], @tokens::bigint[], @outbox_ids::bigint[], @ages_ms::double precision[],
           @numbers::integer[], @durations_ms::real[], @statuses::smallint[], @destinations::text[], @responses::text[])
         as o (claim_id, delivery_id, token, outbox_id, age_ms, number, duration_ms, status, destination, response)
   where o.token = any (array(select finished.token from finished))
)
select o.token
  from unnest(@tokens::bigint[]) as o (token)
 where o.token <> all (array(select finished.token from finished))
