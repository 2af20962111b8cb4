/*
Destinations of deliveries written after @seen, the quick way to new work
after a wake-up. Deliveries of transactions that commit late lie before @seen;
the scan of find.sql comes upon those.

Zero rows: nothing newer is due.
*/
with tail as materialized (
  select d.id, d.destination, d.next_attempt_at
    from postern.delivery d
   where d.id > @seen
   order by d.id
   limit 1000
)
select destination, max(id) as seen
  from tail
 where next_attempt_at <= now()
 group by destination
