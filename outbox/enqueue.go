package outbox

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	statements "postern/sql"
)

// Schema is the name of the schema that holds an outbox, for applications
// whose outbox is not in the schema postern. Its methods may be called
// concurrently.
type Schema string

// Enqueue writes messages in tx and returns a receipt for each, in the order
// of the arguments. With no messages it does nothing.
//
// A message whose idempotency key the tenant has used before is not written,
// and its receipt is that of the first one. While another transaction is
// writing the same key, Enqueue waits for it. Under REPEATABLE READ and
// SERIALIZABLE that one's commit fails this transaction with SQLSTATE 40001,
// and the transaction is to be tried again as a whole.
//
// A message that the outbox refuses gives a *RuleError. Like every failed
// statement that aborts the transaction; to go on all the same, call Enqueue in
// a savepoint (tx.Begin).
func Enqueue(ctx context.Context, tx pgx.Tx, messages ...Message) ([]Receipt, error) {
	return Schema(statements.DefaultSchema).Enqueue(ctx, tx, messages...)
}

// EnqueueSQL is Enqueue for database/sql, with any driver for PostgreSQL. The
// server's refusals are a *RuleError with pgx's driver; with another one they are
// that driver's errors, wrapped, whose text names the same rule.
func EnqueueSQL(ctx context.Context, tx *sql.Tx, messages ...Message) ([]Receipt, error) {
	return Schema(statements.DefaultSchema).EnqueueSQL(ctx, tx, messages...)
}

// Enqueue is the function Enqueue for the outbox in schema s.
func (s Schema) Enqueue(ctx context.Context, tx pgx.Tx, messages ...Message) ([]Receipt, error) {
	return s.enqueue(messages, func(statement, argument string) ([]written, error) {
		rows, err := tx.Query(ctx, statement, argument)
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowToStructByPos[written])
	})
}

// EnqueueSQL is the function EnqueueSQL for the outbox in schema s.
func (s Schema) EnqueueSQL(ctx context.Context, tx *sql.Tx, messages ...Message) ([]Receipt, error) {
	return s.enqueue(messages, func(statement, argument string) (all []written, err error) {
		rows, err := tx.QueryContext(ctx, statement, argument)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, rows.Close()) }()
		for rows.Next() {
			var w written
			if err := rows.Scan(&w.ID, &w.MessageID, &w.Tenant, &w.Key); err != nil {
				return nil, err
			}
			all = append(all, w)
		}
		return all, rows.Err()
	})
}

// written is a row that is in the outbox: just now, or already.
type written struct {
	ID        int64
	MessageID string
	Tenant    string
	Key       string
}

type query func(statement, argument string) ([]written, error)

// enqueue writes the messages, and then finds the first ones of those keys for
// which nothing was written.
func (s Schema) enqueue(messages []Message, run query) ([]Receipt, error) {
	if err := statements.CheckSchema(string(s)); err != nil {
		return nil, fmt.Errorf("outbox: %w", err)
	}
	rows, err := newRows(messages)
	if err != nil {
		return nil, err
	}
	receipts := make([]Receipt, len(messages))
	// A key may be freed between the two statements, when retention or a
	// person deletes its message. Twice in a row is not to be believed.
	for range 3 {
		if len(rows) == 0 {
			return receipts, nil
		}
		if rows, err = s.write(rows, receipts, run); err != nil {
			return nil, refusal(err)
		}
		if len(rows) == 0 {
			return receipts, nil
		}
		if rows, err = s.find(rows, receipts, run); err != nil {
			return nil, refusal(err)
		}
	}
	return nil, errors.New("outbox: enqueue: messages with these idempotency keys are written and deleted all the time")
}

// newRows are sorted by key, so that two transactions that write the same keys
// wait for each other in one order and never in a circle.
func newRows(messages []Message) ([]row, error) {
	rows := make([]row, len(messages))
	for i := range messages {
		rows[i] = newRow(i, &messages[i])
		if err := rows[i].check(); err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		if a.IdempotencyKey == nil || b.IdempotencyKey == nil {
			return cmp.Compare(deref(a.IdempotencyKey), deref(b.IdempotencyKey))
		}
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(*a.IdempotencyKey, *b.IdempotencyKey))
	})
	return rows, nil
}

// write inserts rows, fills in the receipts of those that are new and returns
// the others.
func (s Schema) write(rows []row, receipts []Receipt, run query) ([]row, error) {
	argument, err := encode(rows)
	if err != nil {
		return nil, err
	}
	inserted, err := run(s.statement("enqueue"), argument)
	if err != nil {
		return nil, err
	}
	byID := make(map[string]int64, len(inserted))
	for _, w := range inserted {
		byID[w.MessageID] = w.ID
	}
	return slices.DeleteFunc(rows, func(r row) bool {
		id, isNew := byID[r.MessageID]
		if isNew {
			delete(byID, r.MessageID)
			receipts[r.index] = Receipt{ID: id, MessageID: r.MessageID, New: true}
		}
		return isNew
	}), nil
}

// find fills in the receipts of rows whose key was taken and returns those
// whose key has become free again.
func (s Schema) find(rows []row, receipts []Receipt, run query) ([]row, error) {
	argument, err := encode(rows)
	if err != nil {
		return nil, err
	}
	found, err := run(s.statement("enqueued"), argument)
	if err != nil {
		return nil, err
	}
	type key struct{ tenant, key string }
	byKey := make(map[key]written, len(found))
	for _, w := range found {
		byKey[key{w.Tenant, w.Key}] = w
	}
	return slices.DeleteFunc(rows, func(r row) bool {
		w, taken := byKey[key{r.Tenant, deref(r.IdempotencyKey)}]
		if taken {
			receipts[r.index] = Receipt{ID: w.ID, MessageID: w.MessageID}
		}
		return taken
	}), nil
}

// statement returns a statement with its one argument in the notation that
// every driver knows.
func (s Schema) statement(verb string) string {
	return strings.ReplaceAll(statements.Load(verb, string(s)), "@messages", "$1")
}

// refusal turns the server's error into one that names the rule. The rules and
// constraints of the outbox are named as sentences.
func refusal(err error) error {
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		return fmt.Errorf("outbox: enqueue: %w", err)
	}
	switch server.Code {
	case "23514", "23505": // check_violation, unique_violation
		if server.TableName == "outbox" {
			return &RuleError{Index: -1, Rule: server.ConstraintName, Err: err}
		}
	case "22008", "22007": // datetime_field_overflow, invalid_datetime_format
		return &RuleError{Index: -1, Rule: "deliver_after and expires_at are times that PostgreSQL knows", Err: err}
	case "42P01": // undefined_table
		return fmt.Errorf("outbox: enqueue: the outbox is not in this database: run `postern migrate up`: %w", err)
	}
	return fmt.Errorf("outbox: enqueue: %w", err)
}
