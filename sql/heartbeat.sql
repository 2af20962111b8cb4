/*
Says that this process is alive and what it is doing. Zero rows: its row was
deleted, and it registers again.
*/
update postern.dispatcher
   set heartbeat_at = now(),
       state        = @state,
       in_flight    = @in_flight,
       stopped_at   = case when @state = 'stopped' then now() end
 where id = @dispatcher
returning id
