drop function postern.governed(postern.endpoint, postern.breaker, interval), postern.ramp_share(postern.breaker, interval),
  postern.endpoint_of(text);
drop table postern.tally, postern.governor;
