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

  constraint "an endpoint has one connection" unique (endpoint_id),
  constraint "a source has one connection" unique (source_id)
);

comment on table postern.connection is
  'What an operator trusts one target with: insert into postern.connection (endpoint_id, allow_networks, reason) values (7, ''{10.1.0.0/16}'', ''billing'').';
comment on column postern.connection.origin is 'The scheme, host and port that is trusted. Unless given: that of the URL which the endpoint or source has now.';
comment on column postern.connection.allow_networks is 'Networks that it may be in although they are not public.';
comment on column postern.connection.allow_http is 'Whether it may be plain http://.';
comment on column postern.connection.allow_ports is 'Ports that it may have beside those that every target may have.';
comment on column postern.connection.ca is 'PEM certificates of the authorities that its certificate must come from, instead of the system''s.';
comment on column postern.connection.certificate is 'PEM client certificate, and those between it and its authority.';
comment on column postern.connection.private_key is 'PEM private key of certificate. Secret: no view shows it, and dispatchers with sealing keys seal it within seconds.';
comment on column postern.connection.reason is 'Why, in the words of whoever made it so.';

create index connection_unsealed on postern.connection (id) where private_key not like 'sealed:v1:%';

/* Completes a row, and refuses what is none. The error of a CHECK or of NOT NULL shows
the row, key and all, to whoever reads the server's log; these words show nothing. */

create function postern.complete_connection() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  broken text;
begin
  new.origin := coalesce(
    case when new.origin is not null then postern.destination(new.origin) end,
    (select postern.destination(e.url) from postern.endpoint e where e.id = new.endpoint_id),
    (select postern.destination(s.target_url) from postern.source s where s.id = new.source_id and s.target_url is not null));
  broken := case
    when num_nonnulls(new.endpoint_id, new.source_id) <> 1
    then 'connection of an endpoint or of a source'
    when num_nulls(new.allow_networks, new.allow_http, new.allow_ports, new.created_at) > 0
    then 'allow_networks, allow_http, allow_ports and created_at are not null'
    when octet_length(new.origin) > 300 or new.origin = 'invalid'
    then 'origin is scheme, host and port of a URL'
    when cardinality(new.allow_networks) > 100 or array_position(new.allow_networks, null) is not null
    then 'allow_networks is at most 100 networks'
    when cardinality(new.allow_ports) > 100 or array_position(new.allow_ports, null) is not null
      or not (1 <= all (new.allow_ports) and 65535 >= all (new.allow_ports))
    then 'allow_ports is at most 100 ports from 1 to 65535'
    when octet_length(new.ca) > 65536 or not starts_with(new.ca, '-----BEGIN CERTIFICATE-----')
      or octet_length(new.certificate) > 65536 or not starts_with(new.certificate, '-----BEGIN CERTIFICATE-----')
    then 'ca and certificate are PEM certificates of at most 64 KiB'
    when octet_length(new.private_key) > case when new.private_key like 'sealed:v1:%' then 90000 else 65536 end
    then 'private_key is at most 64 KiB'
    when new.private_key like 'sealed:%' and new.private_key !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$'
    then 'private_key begins with sealed: only where it is sealed'
    when (new.certificate is null) <> (new.private_key is null)
    then 'certificate and private_key belong together'
  end;
  if broken is not null then
    raise exception 'connection refused: %', broken
      using errcode = 'check_violation', schema = tg_table_schema, table = tg_table_name, constraint = left(broken, 63);
  end if;
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
  if tg_op = 'UPDATE' and new.private_key like 'sealed:v1:%' and old.private_key is not null and new.private_key <> old.private_key
     and to_jsonb(new) - 'private_key' = to_jsonb(old) - 'private_key'
  then
    insert into postern.journal (subject, change)
    values (coalesce('ep_' || c.endpoint_id, 'source ' || c.source_id), 'connection: private key sealed');
    return null;
  end if;
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
