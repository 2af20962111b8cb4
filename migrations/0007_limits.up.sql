/*
Limits that are counted over all dispatchers.
*/

/* ---------------------------------------------------------------- governor

What is counted over all dispatchers for one destination. Only destinations
with a limit have a row here, which whoever claims for them locks; all others
never touch one. What is counted has a row of its own for each claim, the
newest of which counts: the deliveries that were leased then, and the tokens of
the rate that were left. The row that is locked is never written, and the ones
before the newest are never looked at, so both cost the same while some
transaction keeps its snapshot and vacuum can remove none of them.

Leases are listed because no index knows of them. A lease that a governed
claim takes is put on the list in the transaction that takes it, so the list
may hold leases that have ended, and never lacks one that has not. Those that
were taken before the destination had a limit are gathered from the head of
its queue when counting begins, and again until claims that had begun without
a limit must have ended. */

create table postern.governor (
  destination text collate "C" primary key
);

comment on table postern.governor is
  'Destinations whose claims are counted over all dispatchers; the rows are there to be locked.';

create table postern.tally (
  destination text collate "C" not null,
  version     bigint not null,
  leases      bigint[] not null,
  epoch       timestamptz,
  since       timestamptz,
  gathered_at timestamptz,
  tokens      double precision,
  refilled_at timestamptz not null,
  primary key (destination, version)
) with (autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.01);

comment on table postern.tally is
  'What is counted of destinations with a limit: leases out, tokens left. Of each the newest row counts.';

/* -------------------------------------------------------------- endpoint_of

The endpoint that a destination names, null for an origin. */

create function postern.endpoint_of(destination text) returns bigint
language sql immutable parallel safe
return case when destination ~ '^ep_[0-9]{1,18}$' then substr(destination, 4)::bigint end;

/* ----------------------------------------------------------------- governed

How many deliveries may be in flight over the fleet while a destination comes
back from an outage: doubling from 1 when its breaker closed to 256 after ramp.
Null when it is not coming back. */

create function postern.ramp_share(breaker postern.breaker, ramp interval) returns integer
language sql stable parallel safe
return case
         when breaker.state = 'closed'
          and breaker.closed_at > now() - ramp
          -- It may lie a little after now(), when our transaction began first, and far where the clock was set back.
          and breaker.closed_at < now() + interval '5 s'
          and ramp > interval '0'
          and (breaker.forced is null or breaker.forced_until <= now())
         then floor(power(2, 8 * greatest(0, extract(epoch from now() - breaker.closed_at)) / extract(epoch from ramp)))::integer
       end;

/* Whether claims for a destination must be counted over all dispatchers. Of
either there may be no row. */

create function postern.governed(endpoint postern.endpoint, breaker postern.breaker, ramp interval) returns boolean
language sql stable parallel safe
return endpoint.max_in_flight is not null
    or endpoint.rate_limit is not null
    or postern.ramp_share(breaker, ramp) is not null;

revoke execute on function
  postern.endpoint_of(text),
  postern.ramp_share(postern.breaker, interval),
  postern.governed(postern.endpoint, postern.breaker, interval)
from public;

comment on function postern.endpoint_of(text) is
  'The endpoint that a destination such as ep_7 names; null for an origin.';
comment on function postern.ramp_share(postern.breaker, interval) is
  'How many deliveries may be in flight over the fleet while a destination comes back from an outage; null: it is not coming back.';
comment on function postern.governed(postern.endpoint, postern.breaker, interval) is
  'Whether claims for a destination are counted over all dispatchers: a cap, a rate, or an outage that ended a moment ago.';
