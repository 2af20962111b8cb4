/*
The processes that dispatch.
*/

/* -------------------------------------------------------------- dispatcher

One row a process start, whose id is random and so never used twice, and what the
process says of itself with every heartbeat: what it is doing, which lock it
waits for, how it gets on with the database and how it usually does. */

create table postern.dispatcher (
  id               bigint primary key default postern.random_id(),
  host             text not null,
  pid              integer not null,
  version          text not null,
  slots            integer not null,
  sealing_keys     text[] not null default '{}',
  in_flight        integer not null default 0,
  unrecorded       integer not null default 0,
  unrecorded_since timestamptz,
  state            text not null default 'running',
  activity         text,
  waiting_for      text,
  waiting_since    timestamptz,
  throughput       real,
  usual_throughput real,
  claim_ms         real,
  usual_claim_ms   real,
  lock_timeouts    integer not null default 0,
  pool_timeouts    integer not null default 0,
  started_at       timestamptz not null default now(),
  heartbeat_at     timestamptz not null default now(),
  stopped_at       timestamptz
) with (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.01);

comment on table postern.dispatcher is
  'Processes that dispatch, one row a start.';
comment on column postern.dispatcher.sealing_keys is
  'Ids of the keys that it can open sealed values with, that of the one it seals with first.';
comment on column postern.dispatcher.throughput is
  'Deliveries that ended per second, lately; usual_throughput over the last minutes.';
comment on column postern.dispatcher.lock_timeouts is
  'Statements that gave up waiting (SQLSTATE 55P03, 57014) in the last 15 s; pool_timeouts likewise for connections.';
comment on column postern.dispatcher.unrecorded is
  'Outcomes that are known and not recorded yet; unrecorded_since is when the oldest became known. While its heartbeats come, nobody claims what was leased to it then.';
