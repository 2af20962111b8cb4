/*
What becomes of endpoints: limits counted over the fleet.
*/

/* ---------------------------------------------------------------- governor

What is counted over all dispatchers for one destination: the deliveries that
were leased when it was last looked at, and the tokens of its rate. Only
destinations with a limit have a row, which whoever claims for them locks; all
others never touch one.

Leases are listed because no index knows of them. A lease that a governed
claim takes is put on the list in the transaction that takes it, so the list
may hold leases that have ended, and never lacks one that has not. Those that
were taken before the destination had a limit are gathered from the head of
its queue when counting begins, and again until claims that had begun without
a limit must have ended. */

create table postern.governor (
  destination text primary key,
  leases      bigint[] not null default '{}',
  epoch       timestamptz,
  since       timestamptz,
  gathered_at timestamptz,
  tokens      double precision,
  refilled_at timestamptz not null default now()
) with (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.01);

comment on table postern.governor is
  'Destinations whose claims are counted over all dispatchers: leases out, tokens left.';

/* -------------------------------------------------------------- endpoint_of

The endpoint that a destination names, null for an origin. */

create function postern.endpoint_of(destination text) returns bigint
language sql immutable parallel safe
as $$
  select case when destination ~ '^ep_[0-9]{1,18}$' then substr(destination, 4)::bigint end
$$;

/* ----------------------------------------------------------------- governed

How many deliveries may be in flight over the fleet while a destination comes
back from an outage: doubling from 1 when its breaker closed to 256 after ramp.
Null when it is not coming back. */

create function postern.ramp_share(breaker postern.breaker, ramp interval) returns integer
language sql stable parallel safe
as $$
  select case
           when breaker.state = 'closed'
            and breaker.closed_at > now() - ramp
            and (breaker.forced is null or breaker.forced_until <= now())
           then floor(power(2, 8 * greatest(0, extract(epoch from now() - breaker.closed_at)) / extract(epoch from ramp)))::integer
         end
$$;

/* Whether claims for a destination must be counted over all dispatchers. Of
either there may be no row. */

create function postern.governed(endpoint postern.endpoint, breaker postern.breaker, ramp interval) returns boolean
language sql stable parallel safe
as $$
  select endpoint.max_in_flight is not null
      or endpoint.rate_limit is not null
      or postern.ramp_share(breaker, ramp) is not null
$$;

revoke execute on function
  postern.endpoint_of(text),
  postern.ramp_share(postern.breaker, interval),
  postern.governed(postern.endpoint, postern.breaker, interval)
from public;

/* ------------------------------------------------------------ life of a row

Whoever changes an endpoint, the same things follow: when it was capped. */

create function postern.endpoint_changes() returns trigger
language plpgsql set search_path = ''
as $$
begin
  if new.max_in_flight is null then
    new.capped_since := null;
  elsif tg_op = 'INSERT' or old.max_in_flight is null then
    new.capped_since := clock_timestamp();
  end if;
  return new;
end
$$;

create trigger endpoint_changes
before insert or update of max_in_flight, capped_since on postern.endpoint
for each row execute function postern.endpoint_changes();

revoke execute on function postern.endpoint_changes() from public;

comment on function postern.endpoint_of(text) is 'The endpoint of a destination ep_<id>; null for an origin.';
comment on function postern.ramp_share(postern.breaker, interval) is 'How many requests a destination may have in flight over the fleet while its share grows back.';
comment on function postern.governed(postern.endpoint, postern.breaker, interval) is 'Whether claims for a destination are counted over all dispatchers.';
comment on function postern.endpoint_changes() is 'Trigger: keeps what governed claims need when limits of an endpoint change.';
