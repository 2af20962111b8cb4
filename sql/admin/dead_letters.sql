/*
Dead letters by cause, those of the last day apart.

  psql -f sql/admin/dead_letters.sql

To try them again: update postern.message set status = 'pending' where status =
'dead' and …; to give them up, set status = 'cancelled'.
*/
select destination, reason, last_status, left(last_error, 60) as last_error,
       count(*) as dead,
       count(*) filter (where created_at > now() - interval '1 day') as written_today,
       min(created_at) as oldest, max(created_at) as newest,
       min(message_id) as example
  from (select d.destination, d.reason, d.last_status, d.last_error, d.created_at, d.message_id
          from postern.dead_letter d
         limit 100000) sample
 group by 1, 2, 3, 4
 order by dead desc
 limit 50;
