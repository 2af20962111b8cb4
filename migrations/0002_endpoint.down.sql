drop function postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision);
drop table postern.endpoint;
drop function postern.rotate_secret(bigint, interval), postern.announce_endpoint(), postern.complete_endpoint(),
  postern.sendable_headers(jsonb), postern.new_secret(),
  postern.subscribes(text[], text), postern.patterns(text), postern.destination(text), postern.origin(text);
