/*
Dead letters by cause, those of the last day apart; of more than 100,000 a
sample, which it says.

  psql -f sql/admin/dead_letters.sql

To try them again: update postern.message set status = 'pending' where status =
'dead' and …; to give them up, set status = 'cancelled'.
*/
with sample as materialized (
  select d.destination, d.reason, d.last_status, d.last_error, d.died_at, d.message_id
    from postern.dead_letter d
   limit 100000
)
select destination, reason, last_status, left(last_error, 60) as last_error,
       count(*) as dead,
       count(*) filter (where died_at > now() - interval '1 day') as of_today,
       min(died_at) as first_died_at, max(died_at) as last_died_at,
       min(message_id) as example,
       case when (select count(*) from sample) = 100000 then 'counts are of a sample of 100,000' end as note
  from sample
 group by 1, 2, 3, 4
 order by dead desc
 limit 50;
