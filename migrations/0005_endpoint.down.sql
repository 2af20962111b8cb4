drop view postern.endpoint_status;
drop trigger announce_endpoint on postern.endpoint;
drop trigger complete_endpoint on postern.endpoint;
alter table postern.endpoint
  alter column secret drop default,
  drop constraint "url is http or https with a host, at most 8192 bytes",
  drop constraint "headers is an object of strings that may be sent",
  drop constraint "secret has no blanks around it",
  drop constraint "secret for standard is whsec_ and base64 of 24 to 64 bytes";
drop function
  postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision),
  postern.rotate_secret(bigint, interval),
  postern.announce_endpoint(),
  postern.complete_endpoint(),
  postern.sendable_headers(jsonb),
  postern.new_secret(),
  postern.governed(postern.endpoint, postern.breaker, interval),
  postern.ramp_share(postern.breaker, interval),
  postern.endpoint_of(text);
drop table postern.tally, postern.governor;
