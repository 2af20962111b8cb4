drop view postern.endpoint_status, postern.held_snapshot, postern.lock_wait, postern.dispatcher_status,
  postern.breaker_status, postern.backlog, postern.throughput, postern.dead_letter;
drop function postern.sample_backlog(integer, interval), postern.estimate_backlog(text, text), postern.sample_throughput();
