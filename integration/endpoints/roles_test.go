package endpoints

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// TestPrivileges has a cluster of its own, since that is what roles belong to.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	cluster := pgtest.OwnCluster(t)
	for name, test := range map[string]func(*testing.T, *pgtest.Database){
		"roles":                 testRoles,
		"dispatcher":            testDispatcherRoleSuffices,
		"hijacking":             testFunctionsCannotBeHijacked,
		"shadows":               testShadowsRunAsTheirOwner,
		"squatting":             testMigrateRefusesWhatOthersMade,
		"migrate's lock":        testMigrateNamesWhoHoldsItsLock,
		"what is said at start": testStartSaysWhatIsMissing,
		"doctor":                testDoctorOfEachRole,
		"secret columns":        testSecretColumns,
	} {
		db := withRoles(t, cluster)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, db)
		})
	}
}

// withRoles is a database whose roles were made by sql/admin/roles.sql.
func withRoles(t testing.TB, cluster *pgtest.Cluster) *pgtest.Database {
	t.Helper()
	db := cluster.DB()
	text, err := os.ReadFile("../../sql/admin/roles.sql")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // it may be run again
		db.Exec(string(text))
	}
	return db
}

// login makes a login of its own in a role and returns its URL.
func login(t testing.TB, db *pgtest.Database, role string) string {
	t.Helper()
	name := role + "_of_" + db.Name[len(db.Name)-12:]
	db.Exec(`create role ` + name + ` login password 'test' in role postern_` + role)
	return as(t, db, name)
}

func as(t testing.TB, db *pgtest.Database, user string) string {
	t.Helper()
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(user, "test")
	return u.String()
}

func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// may runs statements, each in a transaction of its own that is rolled back.
func may(t testing.TB, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if err := try(t, conn, s); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
}

// mayNot wants each statement refused for want of a privilege.
func mayNot(t testing.TB, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, s := range statements {
		var pg *pgconn.PgError
		if err := try(t, conn, s); !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s: %v, want permission denied", s, err)
		}
	}
}

func try(t testing.TB, conn *pgx.Conn, statement string) error {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), statement)
	return err
}

func testRoles(t *testing.T, db *pgtest.Database) {
	id := endpoint(t, db, "a", "https://example.com/hidden-path", `headers = '{"X": "hidden-header"}'`)
	db.Exec(`insert into postern.breaker (destination) values ('https://x.example')`)
	tables := pgtest.Rows[string](t, db, `select c.oid::regclass::text from pg_class c where relnamespace = 'postern'::regnamespace and relkind in ('r', 'v')`)
	views := pgtest.Rows[string](t, db, `select viewname::text from pg_views where schemaname = 'postern'`)

	t.Run("app", func(t *testing.T) {
		conn := connect(t, login(t, db, "app"))
		may(t, conn,
			`insert into postern.outbox (tenant, event_type, payload) values ('a', 'x', '{}')`,
			`insert into postern.outbox (event_type, payload, target_url) values ('x', '{}', 'https://example.com') returning id, message_id`,
			`insert into postern.outbox (event_type, payload, idempotency_key) values ('x', '{}', 'k') on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing returning id`,
			`select * from postern.enqueue('x', '{}', idempotency_key => 'k')`)
		mayNot(t, conn,
			`select payload from postern.outbox`,
			`update postern.outbox set payload = '{}'`,
			`delete from postern.outbox`,
			`truncate postern.outbox`,
			`insert into postern.outbox (id, event_type, payload) values (1, 'x', '{}')`,
			`insert into postern.outbox (event_type, payload, source, event_id) values ('x', '{}', 'github', 'e')`,
			`select id_secret from postern.source`,
			`insert into postern.delivery (outbox_id, destination) values (1, 'https://x')`,
			`select setval('postern.wake_after', 9e18::bigint)`,
			`select postern.add_endpoint('https://x.example')`,
			`select postern.rotate_secret(1)`,
			`select postern.pause('ep_1')`,
			`select postern.replay('x')`,
			`insert into postern.connection (endpoint_id, allow_networks) values (1, '{0.0.0.0/0}')`,
			`update postern.connection set allow_http = true`,
			`create table postern.mine ()`)
		for _, table := range tables {
			if !slices.Contains(views, strings.TrimPrefix(table, "postern.")) {
				mayNot(t, conn, `delete from `+table, `truncate `+table)
			}
			if table != "postern.outbox" {
				mayNot(t, conn, `select * from `+table)
			}
		}
	})
	t.Run("readonly", func(t *testing.T) {
		conn := connect(t, login(t, db, "readonly"))
		for _, view := range views {
			may(t, conn, `select * from postern.`+view)
		}
		for _, table := range tables {
			if !slices.Contains(views, strings.TrimPrefix(table, "postern.")) {
				mayNot(t, conn, `select * from `+table)
			}
		}
		mayNot(t, conn,
			`select secret from postern.endpoint`,
			`update postern.message set status = 'cancelled'`,
			`insert into postern.outbox (event_type, payload) values ('x', '{}')`,
			`select postern.rotate_secret(1)`,
			`select postern.pause('ep_1')`)
	})
	t.Run("operator", func(t *testing.T) {
		conn := connect(t, login(t, db, "operator"))
		may(t, conn,
			`select * from postern.message, postern.backlog, postern.endpoint_status, postern.lock_wait`,
			`update postern.message set status = 'cancelled' where status = 'pending'`,
			`update postern.endpoint set status = 'paused', max_in_flight = 3 where tenant = 'a'`,
			`update postern.endpoint set secret = 'whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=' where tenant = 'a'`,
			`insert into postern.endpoint (url) values ('https://example.com')`,
			`select * from postern.add_endpoint('https://example.com/hook', '{order.*}', 'acme')`,
			`insert into postern.connection (endpoint_id, allow_networks, reason) select id, '{10.0.0.0/8}', 'ours' from postern.endpoint returning origin`,
			`update postern.connection set private_key = null, certificate = null`,
			`delete from postern.connection`,
			`select postern.open_breaker('https://x.example', 'maintenance')`,
			`select postern.close_breaker('https://x.example')`,
			`select postern.pause('https://x.example')`,
			`select postern.replay('x')`,
			`update postern.breaker set state = 'open' where destination = 'https://x.example'`,
			`delete from postern.outbox where message_id = 'x'`)
		if _, err := conn.Exec(t.Context(), `select postern.rotate_secret($1), postern.pause('ep_' || $1::bigint), postern.resume('ep_' || $1::bigint)`, id); err != nil {
			t.Error(err)
		}
		mayNot(t, conn,
			`select secret from postern.endpoint`,
			`select previous_secret from postern.endpoint`,
			`select * from postern.endpoint`,
			`update postern.endpoint set tenant = secret`,
			`insert into postern.endpoint (url) values ('https://example.com') returning secret`,
			`select secret from postern.source`,
			`select private_key from postern.connection`,
			`insert into postern.connection (endpoint_id) select id from postern.endpoint returning private_key`,
			`update postern.outbox set payload = '{}'`)
	})
	t.Run("receiver", func(t *testing.T) {
		conn := connect(t, login(t, db, "receiver"))
		may(t, conn,
			`select * from postern.source`,
			`insert into postern.outbox (message_id, tenant, event_type, payload, source, event_id) values ('m', 's', 'x', '{}', 's', 'e') on conflict (source, event_id) where source is not null do nothing returning id`)
		mayNot(t, conn, `select message_id from postern.outbox`, `select secret from postern.endpoint`, `update postern.source set status = 'disabled'`, `select payload from postern.outbox`)
	})
}

// A dispatcher does all its work with no more than its role.
func testDispatcherRoleSuffices(t *testing.T, db *pgtest.Database) {
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/gone":  receiver.Status(410),
		"/fails": receiver.Status(500),
		"/later": receiver.Sequence(receiver.Status(503, "Retry-After: 1"), receiver.Status(200)),
	}, receiver.Status(200)))
	down := receiver.New(t, receiver.Status(200))
	down.Down()
	endpoint(t, db, "a", rcv.URL, "max_in_flight = 2, rate_limit = 1000")
	gone := endpoint(t, db, "a", rcv.URL+"/gone", "")
	endpoint(t, db, "a", rcv.URL+"/fails", "max_attempts = 2")
	endpoint(t, db, "a", rcv.URL+"/later", "")
	deleted := endpoint(t, db, "a", rcv.URL+"/deleted", "")
	endpoint(t, db, "a", down.URL, "max_attempts = 3")
	config, out := logged(t, db, zerolog.DebugLevel)
	config.DatabaseURL = login(t, db, "dispatcher")
	config.Breaker.Cooldown = time.Second
	config.SealingKeys = sealingKeys(t, sealingKey())
	db.Exec(`insert into postern.source (name, path, scheme, secret) values ('s', '/s', 'github', 'hush')`)
	publish(t, db, "a", 6)
	db.Exec(`insert into postern.outbox (event_type, payload, expires_at) values ('x', '{}', now() + interval '1 s')`)
	change(t, db, deleted, "status = 'deleted'")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(out.String())
		}
	})
	running := fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "each kind of outcome is there", func() bool {
		return pgtest.Scan[bool](t, db, `
			select (select count(*) from postern.attempt where outcome = 'delivered') >= 6
			   and (select count(*) from postern.delivery where status = 'dead' and reason = 'max_attempts') >= 1
			   and (select count(*) from postern.delivery where status = 'cancelled') = 6
			   and (select status = 'disabled' from postern.endpoint where id = $1)
			   and (select count(*) from postern.breaker) > 0`, gone)
	})
	untilSealed(t, db)
	if err := running.Stop(); err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(out.String()) {
		if strings.Contains(line, "42501") || strings.Contains(line, "permission denied") {
			t.Error(line)
		}
	}
	conn := connect(t, config.DatabaseURL)
	mayNot(t, conn,
		`update postern.endpoint set secret = 'x'`,
		`update postern.endpoint set url = 'https://x.example'`,
		`update postern.endpoint set tenant = 'x'`,
		`update postern.source set secret = 'x'`,
		`insert into postern.outbox (event_type, payload) values ('x', '{}')`,
		`update postern.outbox set payload = '{}'`,
		`delete from postern.journal`,
		`select postern.rotate_secret(1)`,
		`create table postern.mine ()`)
	// Its way to seal does nothing else.
	sealed := "'sealed:v1:01234567:" + strings.Repeat("A", 38) + "'"
	db.Exec(`update postern.endpoint set headers = '{"A": "b"}', previous_secret = null`)
	for _, arguments := range []string{
		`url => 'https://x.example/'`,
		`url => replace(url, '//', '//x@')`,
		`url => replace(url, '//', '//' || ` + sealed + ` || '@')`,
		`secret => 'x'`,
		`secret => 'sealed:v1:x'`,
		`previous_secret => ` + sealed,
		`headers => '{"A": "c"}'`,
		`headers => '{}'`,
		`headers => jsonb_build_object('A', ` + sealed + `, 'B', ` + sealed + `)`,
		`public_key => 'x'`,
	} {
		named := map[string]string{"url": "null", "secret": "null", "previous_secret": "null", "headers": "null", "public_key": "null"}
		name, value, _ := strings.Cut(arguments, " => ")
		named[name] = value
		mayNot(t, conn, fmt.Sprintf(`select postern.seal_endpoint(id, hashtextextended(endpoint::text, 0)::text, %s, %s, %s, %s, %s) from postern.endpoint`,
			named["url"], named["secret"], named["previous_secret"], named["headers"], named["public_key"]))
	}
	mayNot(t, conn,
		`select postern.seal_source(id, hashtextextended(source::text, 0)::text, 'x', null, null) from postern.source`,
		`select postern.seal_source(id, hashtextextended(source::text, 0)::text, null, `+sealed+`, null) from postern.source`)
}

// Every column whose name or whose rights mark it secret is sealed, or there is a
// reason why not. One more has to be put into one of the lists.
func testSecretColumns(t *testing.T, db *pgtest.Database) {
	excused := map[string]string{
		"outbox.headers":              "written once and never changed: SECURITY.md, what is not defended",
		"outbox.target_url":           "likewise",
		"source.target_url":           "goes into outbox.target_url with each event",
		"endpoint.secret_fingerprint": "tells nothing of the secret",
		"source.secret_fingerprint":   "likewise",
		"tally.tokens":                "counts what a rate limit allows",
		"delivery.token":              "tells one delivery from another that got its number; gives no access",
	}
	for _, column := range pgtest.Rows[string](t, db, `
		select c.relname || '.' || a.attname
		  from pg_class c
		  join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
		 where c.relnamespace = 'postern'::regnamespace
		   and c.relkind = 'r'
		   and (a.attname ~ 'secret|private|password|token|credential|headers|url'
		        or (not has_column_privilege('postern_operator', c.oid, a.attnum, 'select')
		            and (has_column_privilege('postern_dispatcher', c.oid, a.attnum, 'select')
		                 or has_column_privilege('postern_receiver', c.oid, a.attnum, 'select'))))`) {
		table, name, _ := strings.Cut(column, ".")
		sealed := pgtest.Scan[bool](t, db, `
			select exists (select from pg_proc p where p.pronamespace = 'postern'::regnamespace and p.proname = 'seal_' || $1 and $2 = any (p.proargnames))`, table, name)
		if _, ok := excused[column]; ok == sealed {
			t.Errorf("%s: sealed is %t and excused is %t", column, sealed, ok)
		}
		delete(excused, column)
	}
	for column := range excused {
		t.Errorf("%s is excused and not there", column)
	}
}

// No function runs for everybody, and none that runs with its owner's rights
// looks a name up where a caller may put one.
func testFunctionsCannotBeHijacked(t *testing.T, db *pgtest.Database) {
	for _, name := range pgtest.Rows[string](t, db, `
		select p.oid::regprocedure::text
		  from pg_proc p
		 cross join aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
		 where p.pronamespace = 'postern'::regnamespace and a.grantee = 0`) {
		t.Errorf("everybody may execute %s", name)
	}
	for _, name := range pgtest.Rows[string](t, db, `
		select object
		  from (select oid::regclass::text as object, relowner as owner, relnamespace as namespace from pg_class
		         union all
		        select oid::regprocedure::text, proowner, pronamespace from pg_proc
		         union all
		        select oid::regtype::text, typowner, typnamespace from pg_type) o
		 where namespace = 'postern'::regnamespace
		   and owner <> 'postern_owner'::regrole`) {
		t.Errorf("%s does not belong to postern_owner", name)
	}
	for _, name := range pgtest.Rows[string](t, db, `
		select t.oid::regtype::text
		  from pg_type t
		 cross join aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) a
		 where t.typnamespace = 'postern'::regnamespace and t.typtype = 'd' and a.grantee = 0`) {
		t.Errorf("everybody may use type %s in tables of their own", name)
	}
	endpoint(t, db, "a", "https://example.com/", "")
	db.Exec(`grant temporary on database ` + db.Name + ` to postern_app`)
	conn := connect(t, login(t, db, "app"))
	for _, s := range []string{
		`create temp table delivery (outbox_id bigint, destination text, endpoint_id bigint, next_attempt_at timestamptz)`,
		`create temp table endpoint as select 9 as id, 'a' as tenant, 'active' as status, array['*'] as event_types`,
		`create temp table inserted as select 9::bigint as id, 'a' as tenant, null::text as target_url, 'x' as event_type, null::timestamptz as deliver_after`,
		`create function pg_temp.now() returns timestamptz language sql as 'select ''epoch''::timestamptz'`,
		`create function pg_temp.starts_with(text, text) returns boolean language sql as 'select true'`,
		`create function pg_temp.destination(text) returns text language sql as 'select ''https://evil.example'''`,
		`set search_path = pg_temp, postern, pg_catalog`,
		`insert into postern.outbox (tenant, event_type, payload) values ('a', 'x', '{}')`,
		`insert into postern.outbox (event_type, payload, target_url) values ('x', '{}', 'https://example.org/x')`,
	} {
		if _, err := conn.Exec(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	if n := pgtest.Scan[int](t, conn, `select count(*)::int from pg_temp.delivery`); n != 0 {
		t.Errorf("%d deliveries went into a temporary table", n)
	}
	got := pgtest.Rows[string](t, db, `select regexp_replace(destination, '[0-9]+', 'N') from postern.delivery where next_attempt_at > '2000-01-01' order by 1`)
	if !slices.Equal(got, []string{"ep_N", "https://example.org"}) {
		t.Errorf("deliveries to %v", got)
	}
}

// What is missing is said in words, before anything is claimed.
func testStartSaysWhatIsMissing(t *testing.T, db *pgtest.Database) {
	dispatcherURL := login(t, db, "dispatcher")
	name := pgtest.Scan[string](t, connect(t, dispatcherURL), `select current_user`)
	db.Exec(`create role nobody login password 'test'`)
	db.Exec(`create role halfway login password 'test'`)
	db.Exec(`grant usage on schema postern to halfway; grant select on postern.delivery, postern.schema_migrations to halfway`)
	saysWhatIsMissing(t, db, "no schema", as(t, db, "nobody"),
		[]string{"role nobody may not use schema postern", "sql/admin/roles.sql"})
	saysWhatIsMissing(t, db, "no privileges", as(t, db, "halfway"), []string{
		"role halfway", "update, delete on postern.delivery", "select on postern.endpoint",
		"select, update on sequence postern.wake_after", "execute on function postern.passes"})
	for _, c := range []struct {
		name, prepare string
		words         []string
	}{
		{"read-only", `alter role ` + name + ` set default_transaction_read_only = on`, []string{"read-only", "default_transaction_read_only"}},
		{"row security", `alter role ` + name + ` reset default_transaction_read_only;
			alter table postern.delivery enable row level security`, []string{"row-level security", "postern.delivery", name}},
		{"a policy that lets some rows through", `create policy partly on postern.delivery for all to postern_dispatcher using (id > 0)`, []string{"row-level security"}},
	} {
		db.Exec(c.prepare)
		saysWhatIsMissing(t, db, c.name, dispatcherURL, c.words)
	}
	db.Exec(`create policy wholly on postern.delivery for all to postern_dispatcher using (true) with check (true)`)
	conn := connect(t, dispatcherURL)
	if problems, err := dispatcher.Check(t.Context(), conn, "postern"); err != nil || len(problems) != 0 {
		t.Errorf("with nothing missing: %q, %v", problems, err)
	}
}

func saysWhatIsMissing(t testing.TB, db *pgtest.Database, name, url string, words []string) {
	t.Helper()
	config := fleet.Config(t, db)
	config.DatabaseURL = url
	err := fleet.Start(t, config).Wait()
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("%s: %v; want %q", name, err, w)
		}
	}
}

// The doctor finds nothing wrong with a role that has what its work needs: the
// dispatcher's may read all that the doctor looks at, and an operator's is not
// blamed for what only a dispatcher needs.
func testDoctorOfEachRole(t *testing.T, db *pgtest.Database) {
	for role, want := range map[string]string{
		"dispatcher": "no dispatcher has been heard of", "operator": "is an operator's", "readonly": "is an operator's",
	} {
		config := fleet.Config(t, db)
		config.DatabaseURL = login(t, db, role)
		found, err := dispatcher.Examine(t.Context(), config)
		text := dispatcher.Summary(found)
		if err != nil || dispatcher.Verdict(found) != nil || strings.Contains(text, "not looked at") != (role != "dispatcher") || !strings.Contains(text, want) {
			t.Errorf("%s: %v\n%s", role, err, text)
		}
	}
}
