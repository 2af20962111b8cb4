// Package outbox writes messages for Postern to deliver, in the transaction
// that changes the business's own rows:
//
//	tx, err := pool.Begin(ctx)
//	…
//	_, err = tx.Exec(ctx, `insert into orders …`)
//	…
//	_, err = outbox.Enqueue(ctx, tx, outbox.Message{
//		Type:      "order.created",
//		Payload:   body,
//		TargetURL: "https://example.com/hooks",
//	})
//	…
//	err = tx.Commit(ctx)
//
// A message exists if and only if that transaction commits. Enqueue takes a
// transaction and nothing else: with a pool or a connection it does not
// compile, because a message written beside the transaction could be sent for
// an order that was rolled back.
//
// The package is a convenience. The outbox is a table, and
//
//	insert into postern.outbox (event_type, payload, target_url) values (…)
//
// does the same from any language.
package outbox
