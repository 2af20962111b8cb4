/*
Adds this process to the fleet and returns its number, which claims carry, and
the newest delivery that anybody has begun to write, from where the tail is read.
(The newest row would be behind all dead index entries.) Never zero rows.
*/
insert into postern.dispatcher (host, pid, version, slots, sealing_keys)
values (@host, @pid, @version, @slots, @sealing_keys)
returning id, (select case when s.is_called then s.last_value else 0 end from postern.delivery_id_seq s) as seen
