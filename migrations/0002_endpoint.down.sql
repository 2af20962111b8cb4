drop function postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision, boolean);
drop table postern.endpoint;
drop function postern.check_endpoint(), postern.fingerprint(text), postern.new_private_key(),
  postern.rotate_secret(bigint, interval), postern.announce_endpoint(), postern.complete_endpoint(),
  postern.sendable_headers(jsonb), postern.new_secret(),
  postern.subscribes(text[], text), postern.patterns(text), postern.destination(text), postern.without_user(text), postern.origin(text);
