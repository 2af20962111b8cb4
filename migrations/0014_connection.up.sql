/*
How dispatchers connect to single targets: what an operator trusts them with
beyond all others, and the certificates that they ask for.

It is a table of its own so that whoever may write endpoints and sources, an
application on behalf of its customers perhaps, cannot grant trust with them.

The trust is in an origin: scheme, host and port. It does not follow the
endpoint or source to another URL; the row then counts for nothing until
somebody updates it.
*/

create table postern.connection (
  id             bigint generated always as identity primary key,
  endpoint_id    bigint references postern.endpoint (id) on delete cascade,
  source_id      bigint references postern.source (id) on delete cascade,
  origin         text not null,
  allow_networks cidr[] not null default '{}',
  allow_http     boolean not null default false,
  allow_ports    integer[] not null default '{}',
  ca             text,
  certificate    text,
  private_key    text,
  reason         text,
  created_at     timestamptz not null default now(),

  constraint "connection of an endpoint or of a source"
    check (num_nonnulls(endpoint_id, source_id) = 1),
  constraint "an endpoint has one connection" unique (endpoint_id),
  constraint "a source has one connection" unique (source_id),
  constraint "origin is scheme, host and port of a URL"
    check (octet_length(origin) <= 300 and postern.destination(origin) = origin and origin <> 'invalid'),
  constraint "allow_networks is at most 100 networks"
    check (cardinality(allow_networks) <= 100 and array_position(allow_networks, null) is null),
  constraint "allow_ports is at most 100 ports from 1 to 65535"
    check (cardinality(allow_ports) <= 100 and array_position(allow_ports, null) is null
       and 1 <= all (allow_ports) and 65535 >= all (allow_ports)),
  constraint "ca and certificate are PEM certificates of at most 64 KiB"
    check (coalesce(octet_length(ca) <= 65536 and starts_with(ca, '-----BEGIN CERTIFICATE-----'), true)
       and coalesce(octet_length(certificate) <= 65536 and starts_with(certificate, '-----BEGIN CERTIFICATE-----'), true)),
  constraint "private_key is at most 64 KiB"
    check (octet_length(private_key) <= 65536),
  constraint "certificate and private_key belong together"
    check ((certificate is null) = (private_key is null))
);

comment on table postern.connection is
  'What an operator trusts one target with: insert into postern.connection (endpoint_id, allow_networks, reason) values (7, ''{10.1.0.0/16}'', ''billing'').';
comment on column postern.connection.origin is 'The scheme, host and port that is trusted. Unless given: that of the URL which the endpoint or source has now.';
comment on column postern.connection.allow_networks is 'Networks that it may be in although they are not public.';
comment on column postern.connection.allow_http is 'Whether it may be plain http://.';
comment on column postern.connection.allow_ports is 'Ports that it may have beside those that every target may have.';
comment on column postern.connection.ca is 'PEM certificates of the authorities that its certificate must come from, instead of the system''s.';
comment on column postern.connection.certificate is 'PEM client certificate, and those between it and its authority.';
comment on column postern.connection.private_key is 'PEM private key of certificate. Secret: no view shows it.';
comment on column postern.connection.reason is 'Why, in the words of whoever made it so.';

/* Completes a row, and refuses one without a target. */

create function postern.complete_connection() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
  new.origin := coalesce(
    case when new.origin is not null then postern.destination(new.origin) end,
    (select postern.destination(e.url) from postern.endpoint e where e.id = new.endpoint_id),
    (select postern.destination(s.target_url) from postern.source s where s.id = new.source_id and s.target_url is not null));
  if new.origin is null then
    raise exception 'connection refused: no endpoint or source with this id has a URL'
      using errcode = 'foreign_key_violation';
  end if;
  return new;
end
$$;

create trigger complete_connection
before insert or update on postern.connection
for each row execute function postern.complete_connection();

/* Keeps the journal, which names what is trusted and shows no key, and announces
the change: dispatchers read the table again at once. */

create function postern.announce_connection() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  c postern.connection := coalesce(new, old);
begin
  insert into postern.journal (subject, change, reason)
  values (coalesce('ep_' || c.endpoint_id, 'source ' || c.source_id),
          case tg_op
            when 'DELETE' then 'connection removed'
            else format('connection: origin %s, networks %s, http %s, ports %s, ca %s, client certificate %s',
                        c.origin, c.allow_networks, c.allow_http, c.allow_ports,
                        c.ca is not null, c.certificate is not null)
          end,
          c.reason);
  if pg_notification_queue_usage() < 0.5 and current_setting('max_prepared_transactions')::integer = 0 then
    perform pg_notify('postern.breaker', coalesce('ep_' || c.endpoint_id, ''));
  end if;
  return null;
end
$$;

create trigger announce_connection
after insert or update or delete on postern.connection
for each row execute function postern.announce_connection();

revoke execute on function postern.complete_connection(), postern.announce_connection() from public;

comment on function postern.complete_connection() is
  'Trigger: fills in the origin that a connection is trusted for.';
comment on function postern.announce_connection() is
  'Trigger: keeps the journal of connections and announces changes.';
