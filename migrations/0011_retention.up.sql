/*
Removing what has ended.
*/

/* --------------------------------------------------------------- retention

What has ended is removed in small steps along the primary key, by any
dispatcher, one at a time: the row here is locked for the step and remembers
where the next one goes on. A pass that has come to the young rows starts again
from the beginning, where rows may since have become free. */

create table postern.retention (
  what      text primary key,
  keep      interval,
  keep_dead interval,
  place     bigint not null default 0,
  pass_at   timestamptz,
  step_at   timestamptz,
  removed   bigint not null default 0,
  warning   text,
  warned    boolean not null default false -- in the present pass
);

insert into postern.retention (what) values ('messages'), ('attempts'), ('journal');

comment on table postern.retention is
  'How long what has ended is kept, as the dispatchers'' settings say, and how far removing has come.';

create function postern.retain(what text, keep interval, keep_dead interval, batch integer)
returns table (looked integer, gone integer, ended boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
as $$
declare
  at bigint;
  note text;
begin
  looked := 0;
  gone := 0;
  ended := true;
  select r.place into at from postern.retention r where r.what = $1 for update skip locked;
  if not found or exists (select from postern.breaker b
                           where b.destination = 'database'
                             and (b.state <> 'closed' or not postern.passes(b))) then
    return next;
    return;
  end if;
  if $2 is not null then
    case $1
      when 'messages' then select * into at, looked, gone, ended, note from postern.retain_messages(at, now() - $2, now() - $3, $4);
      when 'attempts' then select * into at, looked, gone, ended from postern.retain_attempts(at, now() - $2, $4);
      when 'journal' then
        delete from postern.journal j
         where j.id in (select k.id from postern.journal k order by k.id limit $4) and j.at < now() - $2;
        get diagnostics gone = row_count;
        ended := gone < $4;
    end case;
  end if;
  update postern.retention r
     set keep = $2, keep_dead = $3, step_at = now(), removed = r.removed + gone,
         place = case when ended or $1 not in ('messages', 'attempts') then 0 else at end,
         pass_at = case when ended then now() else r.pass_at end,
         warning = case when note is not null then note when r.warned or not ended then r.warning end,
         warned = not ended and (r.warned or note is not null)
   where r.what = $1;
  return next;
end
$$;

/* A message may go when nothing waits, is held, or is dead and kept; and when
its last attempt is as old as its retention, so that what was delivered late
can still be looked at. It is locked first, then looked at again with a newer
snapshot: whoever replays it locks it as well.

Messages of the future, from a clock that ran ahead, are no sign that only young
ones follow. What a foreign key of the application refers to is kept, and all
else goes: where one is met, the messages that it keeps are left out. */

create function postern.unreferenced(ids bigint[]) returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  key record;
begin
  for key in
    select c.conrelid::regclass as referrer,
           (select string_agg(format('r.%I = o.%I', a.attname, b.attname), ' and ')
              from unnest(c.conkey, c.confkey) as k (here, there)
              join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k.here
              join pg_attribute b on b.attrelid = c.confrelid and b.attnum = k.there) as condition
      from pg_constraint c
     where c.contype = 'f'
       and c.confrelid = 'postern.outbox'::regclass
       and c.confdeltype in ('a', 'r')
       and c.conparentid = 0
  loop
    execute format('select array(select o.id from postern.outbox o where o.id = any ($1) and not exists (select from %s r where %s))',
                   key.referrer, key.condition)
       into ids using ids;
  end loop;
  return ids;
end
$$;

create function postern.retain_messages(
  place bigint, before timestamptz, dead_before timestamptz, batch integer,
  out at bigint, out looked integer, out gone integer, out ended boolean, out note text)
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  ids bigint[];
  last_at timestamptz;
  last_future timestamptz;
  refused text;
  tries integer := 0;
begin
  select max(x.id), count(*),
         (array_agg(x.created_at order by x.id desc) filter (where x.created_at <= now()))[1],
         max(x.created_at) filter (where x.created_at > now() + interval '1 minute')
    into at, looked, last_at, last_future
    from (select k.id, k.created_at from postern.outbox k where k.id > place order by k.id limit batch) x;
  ended := looked < batch or coalesce(last_at >= before, false);
  if last_future is not null then
    note := format('messages were written in the future, up to %s: a clock ran ahead, and they stay for as long as others after that', last_future);
  end if;
  gone := 0;
  ids := array(
    select o.id
      from postern.outbox o
     where o.id > place and o.id <= at
       and o.created_at < before
       and not exists (
             select from postern.delivery d
              where d.outbox_id = o.id
                and (d.status in ('pending', 'held')
                     or (d.status = 'dead' and not coalesce(d.next_attempt_at < dead_before, false))))
       and not exists (
             select from postern.attempt a
              where a.outbox_id = o.id and a.started_at >= before)
     order by o.id
       for update skip locked);
  while cardinality(ids) > 0 loop
    begin
      set constraints all immediate; -- a deferred one would fail the commit
      delete from postern.delivery d
       where d.id in (
         select k.id
           from postern.delivery k
          where k.outbox_id = any (ids)
            and (k.status = 'cancelled' or (k.status = 'dead' and k.next_attempt_at < dead_before))
          order by k.id
            for update skip locked);
      delete from postern.outbox o
       where o.id = any (ids)
         and not exists (select from postern.delivery d where d.outbox_id = o.id);
      get diagnostics gone = row_count;
      return;
    exception when foreign_key_violation or restrict_violation then
      get stacked diagnostics refused = constraint_name;
      note := format('foreign key %I of the application keeps messages that it refers to', refused);
      tries := tries + 1;
      if tries > 1 then
        return; -- one more was referred to meanwhile; the next pass tries again
      end if;
      begin
        ids := postern.unreferenced(ids);
      exception when insufficient_privilege then
        note := note || ', and others: the owner of this schema may not read the table that has it';
        return;
      end;
    end;
  end loop;
end
$$;

/* An attempt is kept at least as long as its message. They are walked in the
order of messages; a batch may end in the midst of one, where the next goes on. */

create function postern.retain_attempts(
  place bigint, before timestamptz, batch integer,
  out at bigint, out looked integer, out gone integer, out ended boolean)
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
  select max(x.outbox_id), count(*) into at, looked
    from (select k.outbox_id from postern.attempt k where k.outbox_id >= place order by k.outbox_id, k.claim_id limit batch) x;
  ended := looked < batch
    or exists (select from postern.outbox o where o.id = at and o.created_at >= before);
  delete from postern.attempt a
   using (select k.outbox_id, k.claim_id
            from (select l.outbox_id, l.claim_id, l.started_at
                    from postern.attempt l where l.outbox_id >= place order by l.outbox_id, l.claim_id limit batch) k
           where k.started_at < before
             and not exists (select from postern.outbox o where o.id = k.outbox_id)) old
   where a.outbox_id = old.outbox_id and a.claim_id = old.claim_id;
  get diagnostics gone = row_count;
  if at = place and gone = 0 then
    at := at + 1;
  end if;
end
$$;

comment on function postern.retain(text, interval, interval, integer) is
  'One step of retention: looks at the next `batch` rows of messages, attempts or journal and removes those that have ended longer ago than `keep`; dead letters only with `keep_dead`. Does nothing while another process is at it or the database breaker is not closed.';
comment on function postern.unreferenced(bigint[]) is 'Messages to which no foreign key of the application refers. Used by postern.retain_messages.';
comment on function postern.retain_messages(bigint, timestamptz, timestamptz, integer) is 'Used by postern.retain.';
comment on function postern.retain_attempts(bigint, timestamptz, integer) is 'Used by postern.retain.';
revoke execute on function
  postern.retain(text, interval, interval, integer),
  postern.retain_messages(bigint, timestamptz, timestamptz, integer),
  postern.unreferenced(bigint[]),
  postern.retain_attempts(bigint, timestamptz, integer)
from public;

/* ------------------------------------------------------ retention headroom */

create view postern.retention_headroom as
select m.keep,
       m.keep_dead,
       oldest.created_at as oldest_message_at,
       now() - pending.created_at as oldest_pending_age,
       m.keep - (now() - pending.created_at) as headroom,
       load.due,
       load.drain_time,
       m.pass_at as last_pass_at,
       m.removed as messages_removed,
       a.removed as attempts_removed,
       sizes.messages,
       sizes.attempts,
       pg_size_pretty(sizes.bytes) as size,
       concat_ws('; ',
         case when now() - pending.created_at > m.keep then 'messages wait longer than others are kept: see postern.backlog' end,
         case when load.drain_time > m.keep then 'the backlog takes longer to drain than messages are kept' end,
         case when m.keep is not null and m.step_at < now() - interval '1 hour' then 'nothing has removed old messages for an hour: is a dispatcher running?' end,
         case when holder.since > interval '10 minutes'
              then format('%s %s holds back vacuum, for %s: see postern.held_snapshot', holder.kind, holder.who, date_trunc('second', holder.since)) end
       ) as warning
  from postern.retention m
  join postern.retention a on a.what = 'attempts'
  left join lateral (select o.created_at from postern.outbox o order by o.id limit 1) oldest on true
  left join lateral (
    select o.created_at
      from (select d.outbox_id from (select k.outbox_id, k.status from postern.delivery k order by k.id limit 10000) d
             where d.status in ('pending', 'held') limit 1) first
      join postern.outbox o on o.id = first.outbox_id) pending on true
  left join lateral (select sum(b.due)::bigint as due, max(b.drain_time) as drain_time from postern.backlog b) load on true
  left join lateral (
    select (select greatest(reltuples, 0)::bigint from pg_class where oid = 'postern.outbox'::regclass) as messages,
           (select greatest(reltuples, 0)::bigint from pg_class where oid = 'postern.attempt'::regclass) as attempts,
           pg_total_relation_size('postern.outbox') + pg_total_relation_size('postern.delivery')
             + pg_total_relation_size('postern.attempt') as bytes) sizes on true
  left join lateral (
    select h.kind, h.who, h.since from postern.held_snapshot h order by h.since desc nulls last limit 1) holder on true
 where m.what = 'messages';

comment on view postern.retention_headroom is
  'One row: whether anything grows that should not, and a warning in words.';
comment on column postern.retention_headroom.keep is 'How long messages are kept that have ended; null: for ever.';
comment on column postern.retention_headroom.keep_dead is 'How long dead letters are kept, from when they died; null: for ever.';
comment on column postern.retention_headroom.oldest_message_at is 'When the oldest message was written that is still here.';
comment on column postern.retention_headroom.oldest_pending_age is 'Age of the oldest message that is pending or held, among the first 10,000 deliveries. It is not removed, however old.';
comment on column postern.retention_headroom.headroom is 'keep less that age. Below zero, messages wait longer than others are kept.';
comment on column postern.retention_headroom.due is 'Deliveries that are due, as postern.backlog counts them.';
comment on column postern.retention_headroom.drain_time is 'How long the slowest destination takes to drain at its present rate.';
comment on column postern.retention_headroom.last_pass_at is 'When all old messages had last been looked at.';
comment on column postern.retention_headroom.messages_removed is 'Messages removed since the schema was made.';
comment on column postern.retention_headroom.attempts_removed is 'Attempts removed likewise.';
comment on column postern.retention_headroom.messages is 'Messages in the table, as the planner estimates.';
comment on column postern.retention_headroom.attempts is 'Attempts in the table, likewise.';
comment on column postern.retention_headroom.size is 'Size of outbox, delivery and attempt with their indexes.';
comment on column postern.retention_headroom.warning is 'What to look at; empty when all is well.';
