/*
Adds this process to the fleet and returns its number, which claims carry, and
the newest delivery, from where the tail is read. Never zero rows.
*/
insert into postern.dispatcher (host, pid, version, slots)
values (@host, @pid, @version, @slots)
returning id, coalesce((select max(d.id) from postern.delivery d), 0) as seen
