package operate

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// examine returns what the doctor finds, as text.
func examine(t testing.TB, config dispatcher.Config) string {
	t.Helper()
	found, err := dispatcher.Examine(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	return dispatcher.Summary(found)
}

func finds(t testing.TB, config dispatcher.Config, words ...string) {
	t.Helper()
	text := examine(t, config)
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("the doctor does not say %q but:\n%s", w, text)
		}
	}
}

func TestDoctorOfAHealthyDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	finds(t, config, "warning", "no dispatcher has been heard of", "postern run")
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "nothing to say", func() bool { return examine(t, config) == "no trouble found\n" })
}

// Each thing that the doctor is to find, made and found.
func TestDoctorFinds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make []string // %s is the role that the doctor is
		want string
	}{
		"schema behind":     {[]string{`update postern.schema_migrations set version = 2`}, "this program needs"},
		"schema ahead":      {[]string{`update postern.schema_migrations set version = 99`}, "run the newer program"},
		"dirty migration":   {[]string{`update postern.schema_migrations set dirty = true`}, "was cut short"},
		"no schema":         {[]string{`drop schema postern cascade`}, "postern migrate up"},
		"short timeout":     {[]string{`alter role %s set statement_timeout = '900ms'`}, "statement_timeout of this role or database is 900ms"},
		"missing privilege": {[]string{`revoke insert on postern.attempt from %s`}, "lacks insert on postern.attempt"},
		"row security":      {[]string{`alter table postern.delivery enable row level security`}, "row-level security"},
		"invalid index":     {[]string{`update pg_index set indisvalid = false where indexrelid = 'postern.delivery_resting'::regclass`}, "delivery_resting is invalid"},
		"silent dispatcher": {[]string{`insert into postern.dispatcher (host, pid, version, slots, heartbeat_at) values ('web-1', 7, 'v1', 1, now() - interval '2 minutes')`}, "on web-1 has been silent for 00:02:0"},
		"shut breaker":      {[]string{`insert into postern.breaker (destination, state, opened_at, retry_at, reason) values ('https://down.example', 'open', now(), now() + interval '1 hour', 'it is down')`}, "breaker of https://down.example is open: it is down"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			role := strings.ToLower("doctor_" + db.Name[len(db.Name)-12:])
			db.Exec(`create role ` + role + ` login password 'secret-word'`)
			t.Cleanup(func() { db.Exec(`drop owned by ` + role + ` cascade; drop role ` + role) })
			db.Exec(`grant usage on schema postern to ` + role)
			db.Exec(`grant all on all tables in schema postern to ` + role)
			db.Exec(`grant all on all sequences in schema postern to ` + role)
			db.Exec(`grant execute on all functions in schema postern to ` + role)
			for _, sql := range c.make {
				if strings.Contains(sql, "%s") {
					sql = fmt.Sprintf(sql, role)
				}
				db.Exec(sql)
			}
			config := fleet.Config(t, db)
			conn := db.Config()
			config.DatabaseURL = fmt.Sprintf("postgres://%s:secret-word@%s:%d/%s?sslmode=disable", role, conn.Host, conn.Port, db.Name)
			finds(t, config, c.want)
			if text := examine(t, config); strings.Contains(text, "secret-word") {
				t.Errorf("a password is shown: %s", text)
			}
		})
	}
}

func TestDoctorFindsAHeldSnapshot(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	holder := db.Connect()
	mustExec(t, holder, `begin isolation level repeatable read`)
	mustExec(t, holder, `select 1`)
	// Ten minutes would be long for a test.
	db.Exec(`alter view postern.held_snapshot rename to held`)
	db.Exec(`create view postern.held_snapshot as select kind, who, username, application_name, state, since + interval '1 hour' as since, transactions from postern.held`)
	finds(t, fleet.Config(t, db), "holds back vacuum for 01:00:", fmt.Sprint(holder.PgConn().PID()))
}

func TestDoctorFindsAPooler(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	config := fleet.Config(t, db)
	direct := config.DatabaseURL
	config.DatabaseURL = pgtest.PgBouncer(t, db)
	finds(t, config, "pooler that lends connections by transaction")
	config.ListenURL = config.DatabaseURL
	finds(t, config, "notifications do not arrive")
	config.ListenURL = direct
	if text := examine(t, config); strings.Contains(text, "notifications") {
		t.Errorf("with a direct connection to listen on:\n%s", text)
	}
}

func TestDoctorFindsAStandbyAndOtherEncodings(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t, map[string]string{"max_prepared_transactions": "2", "autovacuum": "off", "log_lock_waits": "off"})
	db := c.DB()
	finds(t, fleet.Config(t, db), "max_prepared_transactions", "autovacuum is off", "log_lock_waits is off")
	standby := c.Standby()
	config := fleet.Config(t, db)
	config.DatabaseURL = standby.URL(db.Name)
	finds(t, config, "it is a standby")

	db.Exec(`create database latin encoding 'LATIN1' locale 'C' template template0`)
	config.DatabaseURL = c.URL("latin")
	finds(t, config, "encoded in LATIN1")
}

func TestDoctorCommand(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`update postern.schema_migrations set dirty = true`)
	cmd := exec.Command(fleet.Binary(t), "doctor", "--json")
	cmd.Env = fleet.Environment(db)
	out, err := cmd.Output()
	var found []dispatcher.Finding
	if jsonErr := json.Unmarshal(out, &found); jsonErr != nil || len(found) == 0 || !found[len(found)-1].Error {
		t.Errorf("%v: %s", jsonErr, out)
	}
	if cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("exit code %d (%v), want 1", cmd.ProcessState.ExitCode(), err)
	}
}

func TestStatusCommand(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	writeForLater(t, db, 12, "https://parked.example/")
	write(t, db, 3, rcv.URL+"/")
	rcv.Wait(3, time.Minute)
	db.Exec(`insert into postern.breaker (destination, state, opened_at, retry_at, reason) values ('https://down.example', 'open', now(), now() + interval '1 hour', E'it is\n\x1b[31mdown')`)
	cmd := exec.Command(fleet.Binary(t), "status")
	cmd.Env = fleet.Environment(db)
	out, err := cmd.CombinedOutput()
	for _, want := range []string{"later 12", "https://parked.example", "scheduled", "https://down.example", "it is  [31mdown", "running"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%v: no %q in\n%s", err, want, out)
		}
	}
	cmd = exec.Command(fleet.Binary(t), "status", "--json")
	cmd.Env = fleet.Environment(db)
	out, err = cmd.Output()
	var parsed struct {
		Overall                        map[string]any
		Backlog, Breakers, Dispatchers []map[string]any
	}
	if jsonErr := json.Unmarshal(out, &parsed); jsonErr != nil || err != nil || len(parsed.Backlog) == 0 || len(parsed.Breakers) != 1 || len(parsed.Dispatchers) != 1 {
		t.Fatalf("%v %v: %s", err, jsonErr, out)
	}
	if later, forced := parsed.Overall["later"], parsed.Breakers[0]["forced"]; later != 12.0 || forced != false {
		t.Errorf("later is %v and forced is %v", later, forced)
	}
	// The chapter for operators names what scripts may rely on.
	page, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	for part, object := range map[string]map[string]any{
		"overall": parsed.Overall, "backlog": parsed.Backlog[0], "breakers": parsed.Breakers[0], "dispatchers": parsed.Dispatchers[0],
	} {
		names := slices.Sorted(maps.Keys(object))
		line := fmt.Sprintf("| `%s` | `%s` |", part, strings.Join(names, "`, `"))
		if !strings.Contains(string(page), line) {
			t.Errorf("docs/operating.md does not have\n%s", line)
		}
	}
}

// What is wrong with the schema is said in words, not by what it breaks.
func TestStatusWithoutASchema(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	cmd := exec.Command(fleet.Binary(t), "status")
	cmd.Env = fleet.Environment(db)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "postern migrate up") {
		t.Errorf("%v: %s", err, out)
	}
}
