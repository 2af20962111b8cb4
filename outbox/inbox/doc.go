// Package inbox is the receiving end of at-least-once delivery: it turns
// deliveries that may come twice, or twenty times in the same millisecond, into
// one effect.
//
// The rule is one transaction. The row (source, event id) and whatever the
// event makes the application change are committed together or not at all, and
// the unique key of that row decides who is first:
//
//	insert … on conflict (source, event_id) do nothing → first?     → the application's work → commit → 2xx "processed"
//	                                → duplicate? → nothing to do                   → 2xx "duplicate"
//	                                → a twin is still at work, longer than we wait → 409 "busy", come again
//
// Looking first and inserting later is the mistake this replaces: two
// deliveries both look, both find nothing and both act. Saving the event in a
// transaction of its own is the other one: the work then fails and the sender's
// next try is called a duplicate of something that never happened. A panic, an
// error or a kill at any moment leaves no row here, so that the sender's next
// try is first again.
//
// [Receive] (pgx) and [ReceiveSQL] (database/sql) are the rule alone, for a
// transaction that the caller begins and commits. [Handler] and [HandlerSQL]
// are the rule behind HTTP: limits, signature, transaction, retries and status
// codes. [Schema] is the table, for the receiver's own migrations.
// [Inbox.Prune] forgets events whose senders have surely given up.
//
// Nothing here needs Postern at the other end: any sender with a stable event
// id will do. The package imports no other part of Postern than its signatures.
package inbox
