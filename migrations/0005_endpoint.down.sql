drop trigger endpoint_changes on postern.endpoint;
drop function
  postern.endpoint_changes(),
  postern.endpoint_of(text),
  postern.governed(postern.endpoint, postern.breaker, interval),
  postern.ramp_share(postern.breaker, interval);
drop table postern.governor;
