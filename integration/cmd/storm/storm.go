package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/outbox/inbox"
	"postern/outbox/signature"
)

// storm sends copies of one event at the same moment, again and again with a
// new event, to receivers that share a database and nothing else.
type storm struct {
	Copies    int
	Rounds    int
	Receivers int   // handlers with a pool each: processes, as far as the database can tell
	Pool      int32 // connections of each
	Isolation pgx.TxIsoLevel
	Wait      time.Duration // for a twin, and for a connection; 0 is the inbox's default
}

// result counts answers and what is in the database afterwards.
type result struct {
	Copies     int            `json:"copies"`
	Rounds     int            `json:"rounds"`
	Receivers  int            `json:"receivers"`
	Pool       int32          `json:"pool"`
	Isolation  pgx.TxIsoLevel `json:"isolation"`
	Requests   int            `json:"requests"`
	Processed  int            `json:"processed"`
	Duplicates int            `json:"duplicates"`
	Busy       int            `json:"busy"`
	Errors     int            `json:"errors"`
	Deadlocks  int64          `json:"deadlocks"`
	Effects    int            `json:"effects"`
	OddRounds  int            `json:"odd_rounds"` // not exactly one processed and all others duplicates
	Elapsed    float64        `json:"elapsed_seconds"`
	Details    []string       `json:"details,omitempty"` // the first few errors
}

// verdict is nil if every event took effect exactly once and every copy was
// told so.
func (r result) verdict() error {
	var wrong []string
	complain := func(found bool, format string, args ...any) {
		if found {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	complain(r.Processed != r.Rounds, "%d processed, want %d", r.Processed, r.Rounds)
	complain(r.Duplicates != r.Requests-r.Rounds, "%d duplicates, want %d", r.Duplicates, r.Requests-r.Rounds)
	complain(r.Busy > 0, "%d busy", r.Busy)
	complain(r.Errors > 0, "%d errors", r.Errors)
	complain(r.Deadlocks > 0, "%d deadlocks", r.Deadlocks)
	complain(r.Effects != r.Rounds, "%d effects, want %d", r.Effects, r.Rounds)
	complain(r.OddRounds > 0, "%d rounds without exactly one processed copy", r.OddRounds)
	if wrong != nil {
		return errors.New(strings.Join(wrong, ", "))
	}
	return nil
}

// run uses a schema of its own in the database and drops it afterwards.
func (s storm) run(ctx context.Context, url string) (r result, err error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return r, err
	}
	schema := "inbox_storm_" + strings.ToLower(rand.Text()[:12])
	admin, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return r, err
	}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		_, dropErr := admin.Exec(ctx, "drop schema if exists "+schema+" cascade")
		err = errors.Join(err, dropErr, admin.Close(ctx))
	}()
	if _, err := admin.Exec(ctx, fmt.Sprintf(`create schema %[1]s; set search_path = %[1]s; %[2]s;
		create table effect (id text not null)`, schema, inbox.Schema)); err != nil {
		return r, err
	}
	config.MaxConns = s.Pool
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "set search_path = "+schema)
		return err
	}
	before, err := deadlocks(ctx, admin)
	if err != nil {
		return r, err
	}
	if r, err = s.blow(ctx, config); err != nil {
		return r, err
	}
	// The pools are closed: their sessions have reported what they met.
	after, err := deadlocks(ctx, admin)
	if err != nil {
		return r, err
	}
	r.Deadlocks += after - before
	err = admin.QueryRow(ctx, "select count(*) from effect").Scan(&r.Effects)
	return r, err
}

// blow is the storm itself.
func (s storm) blow(ctx context.Context, config *pgxpool.Config) (result, error) {
	secret := signature.NewSecret()
	t := tally{result: result{Copies: s.Copies, Rounds: s.Rounds, Receivers: s.Receivers, Pool: s.Pool, Isolation: s.Isolation}}
	var urls []string
	for range s.Receivers {
		pool, err := pgxpool.NewWithConfig(ctx, config.Copy())
		if err != nil {
			return t.result, err
		}
		defer pool.Close()
		server := httptest.NewServer(s.receiver(pool, secret, &t))
		defer server.Close()
		urls = append(urls, server.URL)
	}
	transport := &http.Transport{MaxIdleConnsPerHost: s.Copies}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	start := time.Now()
	for round := range s.Rounds {
		requests := make([]*http.Request, s.Copies)
		for i := range requests {
			var err error
			if requests[i], err = request(ctx, urls[i%len(urls)], secret, round); err != nil {
				return t.result, err
			}
		}
		t.round(client, requests)
		if err := ctx.Err(); err != nil {
			return t.result, err
		}
	}
	t.Elapsed = time.Since(start).Seconds()
	return t.result, nil
}

func (s storm) receiver(pool *pgxpool.Pool, secret signature.Secret, t *tally) http.Handler {
	return inbox.Handler(inbox.Options{
		Intake:    inbox.Intake{Source: "storm", Verify: inbox.VerifyWith(signature.Scheme{}, secret)},
		Inbox:     inbox.Inbox{Wait: s.Wait},
		Isolation: s.Isolation, AcquireTimeout: s.Wait,
		Report: func(_ *http.Request, _ inbox.Event, err error) { t.detail(err) },
	}, pool, func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		_, err := tx.Exec(ctx, "insert into effect values ($1)", event.ID)
		return err
	})
}

func request(ctx context.Context, url string, secret signature.Secret, round int) (*http.Request, error) {
	body := fmt.Sprintf(`{"type":"payment.succeeded","data":{"round":%d}}`, round)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	headers, err := signature.Headers(signature.Standard, []signature.Secret{secret}, fmt.Sprintf("evt_%d", round), time.Now(), []byte(body))
	if err != nil {
		return nil, err
	}
	for _, h := range headers {
		r.Header.Set(h.Name, h.Value)
	}
	return r, nil
}

// tally counts answers.
type tally struct {
	mu sync.Mutex
	result
}

// round lets all requests go at once and waits for all answers.
func (t *tally) round(client *http.Client, requests []*http.Request) {
	before := t.result
	gun := make(chan struct{})
	var copies sync.WaitGroup
	for _, r := range requests {
		copies.Go(func() {
			<-gun
			t.count(client.Do(r))
		})
	}
	close(gun)
	copies.Wait()
	if t.Processed != before.Processed+1 || t.Duplicates != before.Duplicates+len(requests)-1 {
		t.OddRounds++
	}
}

func (t *tally) count(response *http.Response, err error) {
	outcome := ""
	if err == nil {
		outcome = response.Header.Get(inbox.OutcomeHeader)
		_, err = io.Copy(io.Discard, response.Body)
		response.Body.Close()
	}
	if err != nil {
		t.detail(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Requests++
	switch {
	case err == nil && outcome == "processed" && response.StatusCode == http.StatusOK:
		t.Processed++
	case err == nil && outcome == "duplicate" && response.StatusCode == http.StatusOK:
		t.Duplicates++
	case err == nil && outcome == "busy":
		t.Busy++
	default:
		t.Errors++
	}
}

func (t *tally) detail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.Details) < 10 {
		t.Details = append(t.Details, err.Error())
	}
	if state := new(pgconn.PgError); errors.As(err, &state) && state.Code == "40P01" {
		t.Deadlocks++
	}
}

func deadlocks(ctx context.Context, conn *pgx.Conn) (n int64, err error) {
	err = conn.QueryRow(ctx, "select deadlocks from pg_stat_database where datname = current_database()").Scan(&n)
	return n, err
}
