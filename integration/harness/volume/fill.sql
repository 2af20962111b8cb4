/*
Fills an empty schema with as many messages as the setting volume.messages says,
as a large installation has them: two thousand destinations, half of them
endpoints of two hundred tenants; of a million and a half messages 57,000 dead,
98,000 waiting, 40,000 of them written by one wrong deployment; 225 breakers
open. For a session with session_replication_role = replica: no trigger fires.
*/
insert into postern.endpoint (tenant, url, event_types, max_in_flight)
select 'tenant-' || i % 200, 'https://customer-' || i || '.example/hook', '{*}', case when i % 50 = 0 then 10 end
  from generate_series(1, 1000) as i;

create temporary table target on commit drop as
select i as n,
       case when i < 1000 then 'ep_' || e.id else 'https://host-' || i || '.example' end collate "C" as destination,
       case when i < 1000 then e.id end as endpoint_id,
       case when i < 1000 then e.tenant else 'tenant-' || i % 200 end as tenant,
       case when i >= 1000 then 'https://host-' || i || '.example/hook' end as url
  from generate_series(0, 1999) as i
  left join (select id, tenant, row_number() over (order by id) - 1 as n from postern.endpoint) e on e.n = i;

/* Each fate is spread over all destinations and times, but for the wrong
deployment, the last that was written. */

create temporary table plan on commit drop as
select n,
       case when n > messages - messages / 37 then n % 20
            else (hashint8(n) & 2147483647) % 2000 end as target,
       case when n > messages - messages / 37 then 'pending'
            when n % 1000 < 39 then 'dead'
            when n % 1000 < 79 then 'pending'
            when n % 1000 < 82 then 'held'
            when n % 1000 < 85 then 'cancelled'
            when n % 1000 = 85 then 'no endpoint'
            else 'delivered' end as fate,
       case when n > messages - messages / 37 then 'deploy.wrong'
            else (array['order.created', 'order.paid', 'invoice.created', 'invoice.paid', 'user.created'])[1 + n % 5] end as event_type,
       now() - (messages - n) * interval '20 days' / messages as created_at
  from (select current_setting('volume.messages')::bigint as messages) size
 cross join generate_series(1, size.messages) as n;

insert into postern.outbox (id, message_id, tenant, event_type, payload, target_url, created_at)
select p.n, 'msg_' || lpad(to_hex(p.n), 16, '0'), t.tenant, p.event_type,
       '{"order":' || p.n || ',"lines":[{"sku":"A-1","quantity":2}]}', t.url, p.created_at
  from plan p join target t on t.n = p.target
 order by p.n;

insert into postern.delivery (id, outbox_id, endpoint_id, message_hash, next_attempt_at, scheduled, attempts, last_status, destination, status, reason, last_error)
select p.n, p.n, t.endpoint_id, hashtextextended('msg_' || lpad(to_hex(p.n), 16, '0'), 0),
       case when p.fate = 'pending' and p.n % 3 = 0 then now() + p.n % 3600 * interval '1 s' else p.created_at end,
       p.fate = 'pending' and p.n % 3 = 0,
       case when p.fate = 'dead' then 8 when p.fate = 'pending' and p.n % 3 = 0 then 2 else 0 end,
       case when p.fate = 'dead' or p.n % 3 = 0 then (array[500, 503, 404, 401])[1 + p.n % 4] end,
       t.destination, p.fate,
       case p.fate when 'dead' then 'max_attempts' when 'held' then 'ticket 4711' when 'cancelled' then 'ticket 4712' end,
       case when p.fate = 'dead' or p.n % 3 = 0 then 'the receiver refused it' end
  from plan p join target t on t.n = p.target
 where p.fate not in ('delivered', 'no endpoint')
 order by p.n;

insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, dispatcher, number, duration_ms, status, outcome, destination, class, error)
select postern.random_id(), p.n, p.n, p.created_at + interval '1 s', 1, case when p.fate = 'dead' then 8 else 1 end, 20,
       case when p.fate = 'delivered' then 200 else 500 end,
       case p.fate when 'delivered' then 'delivered' when 'dead' then 'dead' else 'retry' end,
       t.destination,
       case when p.fate <> 'delivered' then 'status' end, case when p.fate <> 'delivered' then 'the receiver refused it' end
  from plan p join target t on t.n = p.target
 where p.fate in ('delivered', 'dead') or (p.fate = 'pending' and p.n % 3 = 0)
 order by p.n;

insert into postern.breaker (destination, state, opened_at, retry_at, changed_at, trips, reason)
select destination, 'open', now(), now() + interval '1 hour', now(), 3, 'failure rate 0.9'
  from target
 where n % 8 = 5
 order by n
 limit 225;

insert into postern.dispatcher (host, pid, version, slots, heartbeat_at)
values ('worker-1', 1, 'test', 256, now() + interval '1 hour'), ('worker-2', 1, 'test', 256, now() + interval '1 hour');

select setval(pg_get_serial_sequence('postern.outbox', 'id'), current_setting('volume.messages')::bigint),
       setval(pg_get_serial_sequence('postern.delivery', 'id'), current_setting('volume.messages')::bigint);
