/*
What keeps messages from being delivered, or may one day, in words: for doctor,
status, the dispatchers' log and alerts.
*/

/* ------------------------------------------------------------------ missed

Messages for which no delivery was written, because the trigger that writes
them did not fire: a restore that broke off left it disabled, or a session
had set session_replication_role to replica. A message that is delivered has an
attempt; one that nobody subscribed to when it was written is not missed. */

create function postern.sample_missed(newest integer default 5000)
returns table (missed bigint, first_id bigint, last_at timestamptz)
language sql stable security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
  select count(*), min(m.id), max(m.created_at)
    from (select o.* from postern.outbox o order by o.id desc limit newest) m
   where not exists (select from postern.delivery d where d.outbox_id = m.id offset 0)
     and not exists (select from postern.attempt a where a.outbox_id = m.id offset 0)
     and (m.target_url is not null
          or exists (select
                       from postern.endpoint e
                      where e.tenant = m.tenant and e.status <> 'deleted' and e.created_at <= m.created_at
                        and e.event_types && postern.patterns(m.event_type)
                     offset 0))
$$;

/* Writes the deliveries of such messages, as the trigger would have. Whoever
retains messages waits, and so does another who mends: what he has mended may be
delivered already, and is seen only by a statement that begins after him. */

create function postern.fan_out_missed(after bigint default 0, batch integer default 100000,
  out looked integer, out mended integer, out last_id bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
begin
  perform from postern.retention r where r.what = 'messages' for update;
  select count(*), max(o.id) into looked, last_id
    from (select k.id from postern.outbox k where k.id > after order by k.id limit batch) o;
  with missed as materialized (
    select o.id, o.message_id, o.tenant, o.event_type, o.target_url, o.created_at, greatest(now(), o.deliver_after) as due
      from postern.outbox o
     where o.id > after and o.id <= last_id
       and not exists (select from postern.delivery d where d.outbox_id = o.id offset 0)
       and not exists (select from postern.attempt a where a.outbox_id = o.id offset 0)
  ),
  written as (
    insert into postern.delivery (outbox_id, destination, endpoint_id, message_hash, next_attempt_at)
    select m.id, postern.destination(m.target_url), null, hashtextextended(m.message_id, 0), m.due
      from missed m
     where m.target_url is not null
     union all
    select m.id, 'ep_' || e.id, e.id, hashtextextended(m.message_id, 0), m.due
      from missed m
      join postern.endpoint e on e.tenant = m.tenant and e.status <> 'deleted' and e.created_at <= m.created_at
                             and e.event_types && postern.patterns(m.event_type)
     where m.target_url is null
        on conflict (outbox_id, destination) do nothing
    returning outbox_id
  )
  select count(distinct w.outbox_id) into mended from written w;
  if mended > 0 then
    insert into postern.journal (subject, change, reason)
    values ('outbox', 'fanned out', format('%s messages that had no deliveries, up to %s', mended, last_id));
  end if;
end
$$;

comment on function postern.sample_missed(integer) is
  'How many of the newest messages have no deliveries although somebody is to get them.';
comment on function postern.fan_out_missed(bigint, integer) is
  'Writes the deliveries of messages whose trigger did not fire, among `batch` messages after `after`: select * from postern.fan_out_missed(); again with after => last_id until looked is 0.';
revoke execute on function postern.sample_missed(integer), postern.fan_out_missed(bigint, integer) from public;

/* ----------------------------------------------------------------- trouble */

create view postern.trouble as
select 'trigger_off' as what,
       t.tgname = 'fan_out' as error,
       format('trigger %s of %s is disabled', t.tgname, t.tgrelid::regclass)
         || case when t.tgname = 'fan_out' then ': messages are written and nobody gets them' else '' end as finding,
       format('alter table %s enable trigger %I', t.tgrelid::regclass, t.tgname)
         || case when t.tgname = 'fan_out' then '; then select * from postern.fan_out_missed()' else '' end as mend
  from pg_trigger t
  join pg_class c on c.oid = t.tgrelid
 where c.relnamespace = (select r.relnamespace from pg_class r where r.oid = 'postern.outbox'::regclass)
   and not t.tgisinternal
   and t.tgenabled in ('D', 'R')
 union all
select 'trigger_off', true,
       'postern.outbox has no trigger fan_out: messages are written and nobody gets them',
       'create trigger fan_out after insert on postern.outbox for each row execute function postern.fan_out(); then select * from postern.fan_out_missed()'
 where not exists (select from pg_trigger t where t.tgrelid = 'postern.outbox'::regclass and t.tgname = 'fan_out')
 union all
select 'trigger_off', true,
       format('session_replication_role is set for %s: its messages are written and nobody gets them',
              coalesce('role ' || r.rolname, 'the database')),
       'take it back with alter role or alter database … reset session_replication_role; then select * from postern.fan_out_missed()'
  from pg_db_role_setting s
 cross join unnest(s.setconfig) as setting
  left join pg_roles r on r.oid = s.setrole
 where setting ~ '^session_replication_role=(replica|"replica")$'
   and s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
 union all
select 'missed_messages', true,
       format('%s of the newest 5000 messages have no deliveries, the first with id %s: their trigger did not fire', m.missed, m.first_id),
       'when the triggers are enabled: select * from postern.fan_out_missed()'
  from postern.sample_missed() m
 where m.missed > 0
 union all
select 'foreign_key',
       c.confrelid = 'postern.delivery'::regclass,
       format('foreign key %I on %s refers to %s', c.conname, c.conrelid::regclass, c.confrelid::regclass)
         || case
              when c.confrelid = 'postern.delivery'::regclass then ': a delivery that it refers to cannot be finished, and is sent again'
              when c.confdeltype = 'c' then ': retention deletes its rows with the messages'
              else ': what it refers to is never removed'
            end,
       format('alter table %s drop constraint %I', c.conrelid::regclass, c.conname)
         || case when c.confrelid = 'postern.outbox'::regclass and c.confdeltype <> 'c' then ', or keep message_id there and no key' else '' end
  from pg_constraint c
 where c.contype = 'f'
   and c.conparentid = 0
   and c.confrelid in ('postern.outbox'::regclass, 'postern.delivery'::regclass, 'postern.attempt'::regclass)
 union all
select 'retention', false, r.warning,
       'psql -x -f sql/admin/retention.sql; a clock that ran ahead is to be set by NTP'
  from postern.retention r
 where r.warning is not null
 union all
select 'no_dispatcher',
       due.since is not null,
       'no dispatcher has been heard of for half a minute: messages wait'
         || coalesce(', the oldest for ' || date_trunc('second', now() - due.since), ''),
       'start one: postern run'
  from (select min(b.oldest_due_at) as since from postern.sample_backlog(1, interval '100 ms') b) due
 where not exists (select from postern.dispatcher_status s where s.state not in ('stopped', 'silent'));

comment on view postern.trouble is
  'What keeps messages from being delivered, or may one day; empty when all is well. postern doctor, postern status, the dispatchers'' log and the metric postern_trouble say the same.';
comment on column postern.trouble.what is 'Which kind: trigger_off, missed_messages, foreign_key, retention or no_dispatcher.';
comment on column postern.trouble.error is 'Whether it keeps messages from being delivered now.';
comment on column postern.trouble.finding is 'What is wrong, in words.';
comment on column postern.trouble.mend is 'What mends it.';
