// Package receive is the front door: it takes webhooks from outside and writes
// them into the outbox, from where a dispatcher delivers them inside.
//
//	find source → admit → read → verify → write → answer
//
// What it promises.
//
//   - A 2xx is sent after the commit and never before. What got a 2xx is in the
//     outbox exactly once, however often it came: message_id and idempotency key
//     are made of source and event id.
//   - Every request is answered within Config.Timeout and a little, whatever
//     state Postgres is in, so that the strictest sender (5 s) sees a status
//     and not its own deadline. An answer other than 2xx means "come again"; the
//     event may yet turn out to be written, and is then told to be a duplicate.
//   - Nothing waits in memory. Bodies share a budget of bytes, writes a number
//     of slots; who comes when they are used up is told at once to come later.
//   - What is refused costs no statement: size, signature and id are judged
//     before the database hears of the request.
//
// Sources are rows of postern.source. This process keeps a copy, reads it again
// when a notification says that something has changed and every half minute in
// any case, and goes on with what it has while the database is away.
package receive
