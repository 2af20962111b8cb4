/*
Adds this process to the fleet again, under the number it had: its row was
deleted while it was not heard of. Zero rows: it is there after all.
*/
insert into postern.dispatcher (id, host, pid, version, slots, sealing_keys)
values (@dispatcher, @host, @pid, @version, @slots, @sealing_keys)
    on conflict (id) do nothing
returning id
