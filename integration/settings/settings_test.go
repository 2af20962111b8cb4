// Package settings has the whole way of a message run under settings that
// somebody made for the role and the database, on direct connections and through
// a pooler that lends them by transaction.
package settings

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"postern/dispatcher/receive"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/migrations"
	"postern/outbox/signature"
	"postern/sql/session"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// foreign are settings that change how values are written and read, how long
// anything may take, what is durable, or how statements are planned.
var foreign = [][]string{
	{"client_encoding = LATIN1"},
	{"datestyle = 'German, DMY'", "timezone = 'Asia/Kathmandu'"},
	{"datestyle = 'SQL, DMY'", "intervalstyle = iso_8601"},
	{"datestyle = 'Postgres, MDY'", "intervalstyle = sql_standard"},
	{"intervalstyle = postgres_verbose", "bytea_output = escape", "extra_float_digits = -15"},
	{"array_nulls = off"},
	{"transform_null_equals = on", "xmlbinary = hex", "xmloption = document", "default_text_search_config = 'pg_catalog.german'"},
	{"standard_conforming_strings = off", "backslash_quote = off", "escape_string_warning = off"},
	{"quote_all_identifiers = on", "check_function_bodies = off"},
	{"synchronous_commit = off"},
	{"idle_session_timeout = '700ms'"},
	{"exit_on_error = on"},
	{"search_path = 'decoy, public'"},
	{"row_security = off"},
	{"default_transaction_isolation = serializable", "default_transaction_deferrable = on"},
	{"statement_timeout = '2s'", "lock_timeout = '1ms'", "idle_in_transaction_session_timeout = '1s'"},
	{"session_replication_role = replica"},
	{"client_min_messages = debug1", "stats_fetch_consistency = none", "work_mem = '64kB'", "temp_tablespaces = ''", "default_tablespace = ''"},
	{"enable_indexscan = off", "enable_nestloop = off", "enable_tidscan = off", "random_page_cost = 1000", "plan_cache_mode = force_custom_plan",
		"join_collapse_limit = 1", "geqo_threshold = 2", "force_parallel_mode = on", "max_parallel_workers_per_gather = 4"},
}

func TestForeignSettingsChangeNothing(t *testing.T) {
	t.Parallel()
	for _, settings := range foreign {
		t.Run(strings.Fields(settings[0])[0]+" "+strings.Fields(settings[0])[2], func(t *testing.T) {
			t.Parallel()
			db := pgtest.EmptyDB(t)
			prepare(t, db, settings)
			(&story{T: t, way: "direct", url: db.URL, db: db}).run()
			(&story{T: t, way: "pooled", url: pgtest.PgBouncer(t, db), db: db}).run()
		})
	}
}

// prepare makes the settings, of the strongest kind that there is, and migrates.
func prepare(t *testing.T, db *pgtest.Database, settings []string) {
	t.Helper()
	for _, s := range settings {
		if strings.HasPrefix(s, "force_parallel_mode") && pgtest.Scan[int](t, db, `select current_setting('server_version_num')::int`) >= 160000 {
			s = strings.Replace(s, "force_parallel_mode", "debug_parallel_query", 1)
		}
		db.Exec(fmt.Sprintf(`alter database %s set %s`, db.Name, s))
		db.Exec(fmt.Sprintf(`alter role current_user in database %s set %s`, db.Name, s))
	}
	db.Pool.Reset()
	if err := migrations.Up(t.Context(), db.URL, "postern"); err != nil {
		t.Fatal(err)
	}
	application := application(t, db.URL)
	// What the writing sessions have made of two settings, where a value cannot show it.
	for _, text := range []string{`
		create table public.seen (way text, name text, value text)`, `
		create function public.look() returns trigger language plpgsql as $$
		begin
			insert into public.seen values (current_setting('application_name'), 'synchronous_commit', current_setting('synchronous_commit'));
			return null;
		end $$`,
		`create trigger look after insert on postern.attempt for each statement execute function public.look()`,
		`create trigger look after insert on postern.outbox for each statement execute function public.look()`,
		`alter table postern.attempt enable always trigger look`,
		`alter table postern.outbox enable always trigger look`,
	} {
		if _, err := application.Raw().Exec(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
}

// application is a session that is as it should be, for what is not under test.
func application(t *testing.T, url string) *session.Conn {
	t.Helper()
	conn, err := session.Dial(t.Context(), url, session.Options{Schema: "postern", Name: "application"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

const text = `{"name":"Zoé","smile":"😀","null":"NULL","slash":"\\n"}`

// story is the whole way of messages, one way to the database.
type story struct {
	*testing.T
	way, url string
	db       *pgtest.Database
	log      buffer
}

func (s *story) run() {
	own := application(s.T, s.url)
	rcv := receiver.New(s.T, receiver.EachMessage(func() receiver.Script {
		return receiver.Sequence(receiver.Body(500, "NULL"), receiver.Status(200))
	}))
	config := fleet.Config(s.T, s.db)
	config.DatabaseURL = s.url
	config.Log = zerolog.New(&s.log)
	running := fleet.Start(s.T, config)
	door, stop := s.receive()
	s.exec(own, `insert into postern.endpoint (tenant, url, secret, timeout, backoff_base, backoff_cap)
		values ('`+s.way+`', '`+rcv.URL+`/é', '`+fleet.Secret+`', '20 seconds', '00:00:00.2', '1 second')`)
	s.exec(own, `insert into postern.source (name, path, secret, tolerance, target_url)
		values ('`+s.way+`', '/`+s.way+`', '`+fleet.Secret+`', '7 minutes', '`+rcv.URL+`/in')`)
	s.exec(own, `insert into postern.outbox (message_id, tenant, event_type, payload) values ('out_`+s.way+`', '`+s.way+`', 'a', '`+text+`')`)
	s.send(door)
	rcv.Wait(4, time.Minute)
	s.check(own, rcv)
	if strings.Contains(s.Name(), "idle_session_timeout") { // sessions that last longer than it
		time.Sleep(1500 * time.Millisecond)
	}
	s.tools()
	stop()
	if err := running.Stop(); err != nil {
		s.Errorf("%s: run ended with %v", s.way, err)
	}
	for line := range strings.Lines(s.log.String()) {
		if s.replica() && strings.Contains(line, "trigger_off") {
			continue
		}
		if strings.Contains(line, `"level":"error"`) || strings.Contains(line, "57P05") || strings.Contains(line, "sources cannot be read") {
			s.Errorf("%s: %s", s.way, line)
		}
	}
}

func (s *story) replica() bool { return strings.Contains(s.Name(), "session_replication_role") }

func (s *story) exec(conn *session.Conn, text string, args ...any) {
	s.Helper()
	if err := conn.Do(s.Context(), func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, text, args...)
		return err
	}); err != nil {
		s.Fatalf("%s: %v\n%s", s.way, err, text)
	}
}

// check sees that each message came twice, with the very bytes, and that both
// attempts are in the log as they were.
func (s *story) check(conn *session.Conn, rcv *receiver.Receiver) {
	s.Helper()
	byTarget := map[string]int{}
	for _, r := range rcv.Requests() {
		byTarget[r.Target[:3]]++
		if string(r.Body) != text {
			s.Errorf("%s: %s got %q, want %q", s.way, r.Target, r.Body, text)
		}
	}
	if byTarget["/in"] != 2 || len(byTarget) != 2 {
		s.Errorf("%s: requests by target: %v, want two of each", s.way, byTarget)
	}
	type summary struct {
		Attempts, Nulls, Errors int64
		Loose                   *string
	}
	var got summary
	pgtest.Eventually(s.T, time.Minute, "everything is delivered and recorded", func() bool {
		err := conn.Do(s.Context(), func(ctx context.Context, conn *pgx.Conn) error {
			rows, _ := conn.Query(ctx, `
				select count(*) as attempts,
				       count(*) filter (where a.error = 'NULL') as nulls,
				       count(*) filter (where a.response = 'NULL') as errors,
				       (select string_agg(way || ' ' || value, ', ') from public.seen where value <> 'on' and way like 'postern%') as loose
				  from postern.attempt a
				 where not exists (select from postern.delivery)`)
			var err error
			got, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[summary])
			return err
		})
		if err != nil {
			s.Fatalf("%s: %v", s.way, err)
		}
		return got.Attempts > 0
	})
	most := map[string]int64{"direct": 4, "pooled": 8}[s.way]
	if got.Attempts != most || got.Nulls != 0 || got.Loose != nil {
		s.Errorf("%s: %d attempts, want %d; %d with the text NULL; not durable: %v", s.way, got.Attempts, most, got.Nulls, got.Loose)
	}
}

// receive starts a front door.
func (s *story) receive() (base string, stop func()) {
	s.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.Context()))
	ended := make(chan error, 1)
	go func() {
		ended <- receive.Serve(ctx, receive.Config{
			DatabaseURL: s.url, Schema: "postern", Timeout: 20 * time.Second, Connections: 2, Memory: 64 << 20,
			MaxSenders: 100, PerAddress: 100, ReloadInterval: time.Second, ShutdownGrace: 5 * time.Second, Log: zerolog.New(&s.log),
		}, listener)
	}()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-ended; err != nil {
				s.Errorf("%s: receive ended with %v", s.way, err)
			}
		})
	}
	s.Cleanup(stop)
	return "http://" + listener.Addr().String(), stop
}

// send has the event taken once, and known the second time.
func (s *story) send(door string) {
	s.Helper()
	secret, err := signature.ParseSecret(fleet.Secret)
	if err != nil {
		s.Fatal(err)
	}
	for _, want := range []string{"accepted", "duplicate"} {
		pgtest.Eventually(s.T, time.Minute, "the front door takes it: "+want, func() bool {
			r, err := http.NewRequestWithContext(s.Context(), http.MethodPost, door+"/"+s.way, strings.NewReader(text))
			if err != nil {
				s.Fatal(err)
			}
			r.Header.Set("Content-Type", "application/json")
			headers, err := signature.Headers(signature.Standard, []signature.Secret{secret}, "evt_"+s.way, time.Now(), []byte(text))
			if err != nil {
				s.Fatal(err)
			}
			for _, h := range headers {
				r.Header.Set(h.Name, h.Value)
			}
			response, err := http.DefaultClient.Do(r)
			if err != nil {
				s.Fatal(err)
			}
			response.Body.Close()
			return response.Header.Get("Postern-Outcome") == want
		})
	}
}

// tools runs what people run, as programs.
func (s *story) tools() {
	s.Helper()
	for _, args := range [][]string{{"status", "--json"}, {"status", "--once"}, {"doctor", "--json"}, {"doctor"}, {"migrate", "status"}, {"migrate", "up"}} {
		if s.way == "pooled" && args[len(args)-1] == "up" {
			continue // it refuses a pooler
		}
		cmd := exec.CommandContext(s.Context(), fleet.Binary(s.T), args...)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url)
		var said, failed bytes.Buffer
		cmd.Stdout, cmd.Stderr = &said, &failed
		err := cmd.Run()
		if args[0] == "doctor" && s.replica() {
			// It changes what the application's own sessions do.
			if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(said.String(), "session_replication_role is set for") {
				s.Errorf("%s: postern doctor: %v\n%s", s.way, err, said.String())
			}
			continue
		}
		if err != nil {
			s.Errorf("%s: postern %s: %v\n%s%s", s.way, strings.Join(args, " "), err, said.String(), failed.String())
		}
		if args[len(args)-1] == "--json" && !json.Valid(said.Bytes()) {
			s.Errorf("%s: postern %s: %s", s.way, strings.Join(args, " "), said.String())
		}
	}
}

// buffer is a log that several goroutines write.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
