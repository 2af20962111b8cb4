package operate

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
)

// Every act leaves its entry, by whatever path, and no entry shows a secret, a
// URL's path or a header's value.
func TestJournalOfEveryPath(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	mustExec(t, conn, `set application_name = 'deploy'`)
	mustExec(t, conn, `insert into postern.outbox (message_id, event_type, payload, target_url) select 'm' || i, 'a.b', '{}', 'https://example.com/' from generate_series(1, 8) i`)
	const secret = "hidden-and-long-enough"
	for _, c := range []struct{ statement, want string }{
		{`insert into postern.endpoint (url, style, secret, headers) values ('https://example.com/hidden', 'plain', '` + secret + `', '{"X": "hidden"}')`, `ep_1|added|null|f`},
		{`update postern.endpoint set status = 'paused', reason = 'asked', url = 'https://example.org/hidden', timeout = '3 s'`, `ep_1|paused; changed: timeout, url|null|f`},
		{`update postern.endpoint set secret = secret || '2', previous_secret = secret, previous_until = now(), url = 'https://example.org/hidden2'`, `ep_1|secret rotated; changed: url|null|f`},
		{`insert into postern.source (name, path, secret, target_url) values ('s', '/s', '` + secret + `', 'https://example.com/hidden')`, `source s|added|null|f`},
		{`update postern.source set secret = secret || '2', target_url = 'https://example.org/hidden'`, `source s|changed: secret, target_url|null|f`},
		{`delete from postern.source`, `source s|removed|null|f`},
		{`truncate postern.source cascade`, `source|truncated|null|t`},
		{`insert into postern.breaker (destination) values ('https://b.example')`, `https://b.example|insert by hand|null|f`},
		{`update postern.breaker set trips = 3`, `https://b.example|update by hand|null|f`},
		{`update postern.breaker set forced = 'open', reason = 'asked'`, `https://b.example|forced open|null|f`},
		{`delete from postern.breaker`, `https://b.example|closed|null|f`},
		{`update postern.message set status = 'held' where event_type = 'a.b' and outbox_id in (select outbox_id from postern.delivery where status = 'pending' order by 1 limit 2)`, `message|2 held|2|t`},
		{`update postern.delivery set status = 'cancelled' where status = 'held'`, `delivery|2 cancelled|2|t`},
		{`update postern.delivery set status = 'pending' where status = 'cancelled'`, `delivery|2 pending|2|t`},
		{`delete from postern.delivery where id in (select id from postern.delivery order by id limit 3)`, `delivery|3 deleted|3|t`},
		{`delete from postern.outbox where message_id in ('m1', 'm2')`, `message|2 deleted|2|t`},
		{`delete from postern.outbox where payload = 'hidden' or message_id = 'm3'`, `message|1 deleted|1|f`},
		{`delete from postern.endpoint`, `ep_1|removed|null|f`},
	} {
		mustExec(t, conn, `delete from postern.journal`)
		mustExec(t, conn, c.statement)
		got := strings.Join(pgtest.Rows[string](t, db, `select concat_ws('|', regexp_replace(subject, '^ep_[0-9]+', 'ep_1'), change, coalesce(rows::text, 'null'), statement is not null) from postern.journal order by id`), "; ")
		if got != c.want {
			t.Errorf("%s\n got %s\nwant %s", c.statement, got, c.want)
		}
		if who := pgtest.Rows[string](t, db, `select distinct concat_ws(' ', actor = session_user, role = current_user, application) from postern.journal`); len(who) != 1 || who[0] != "t t deploy" {
			t.Errorf("%s: by %q", c.statement, who)
		}
		if shown := pgtest.Rows[string](t, db, `select j::text from postern.journal j where j::text like '%hidden%'`); len(shown) > 0 {
			t.Errorf("%s: the journal shows %s", c.statement, shown)
		}
	}
	mustExec(t, conn, `delete from postern.journal`)
	mustExec(t, conn, `insert into postern.breaker (destination, state) values ('https://c.example', 'open')`)
	mustExec(t, conn, `update postern.breaker set forced = 'closed', reason = 'why'`)
	if got := pgtest.Scan[string](t, db, `select concat_ws(' ', old ->> 'forced', new ->> 'forced', reason, old ? 'destination') from postern.journal order by id desc limit 1`); got != "closed why f" {
		t.Errorf("old and new: %q", got)
	}
	// Whoever took another role is named with both.
	role := "auditor_" + strings.ToLower(db.Name[len(db.Name)-10:])
	db.Exec(`create role ` + role)
	t.Cleanup(func() { db.Exec(`drop owned by ` + role + `; drop role ` + role) })
	db.Exec(`grant usage on schema postern to ` + role + `; grant select, insert, update, delete on postern.breaker to ` + role)
	mustExec(t, conn, `set role `+role)
	mustExec(t, conn, `delete from postern.breaker`)
	if got := pgtest.Scan[string](t, db, `select role from postern.journal order by id desc limit 1`); got != role {
		t.Errorf("the act of %s is by %s", role, got)
	}
}

// What dispatchers do all day writes no entry, and nothing of it is counted.
func TestJournalIsSilentForDispatchers(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config, err := pgx.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.RuntimeParams["application_name"] = "postern"
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	for _, s := range []string{
		`insert into postern.outbox (event_type, payload, target_url) select 'a.b', '{}', 'https://example.com/' from generate_series(1, 4) i`,
		`update postern.delivery set leased_until = now() + interval '1 minute', claim_id = id, claimed_by = 1`,
		`delete from postern.delivery where id % 2 = 0`,
		`update postern.delivery set status = 'dead', reason = 'gone', leased_until = null, claim_id = null, claimed_by = null`,
		`insert into postern.breaker (destination) values ('https://b.example')`,
		`update postern.breaker set hold_until = now() + interval '1 s'`,
		`delete from postern.breaker`,
	} {
		mustExec(t, conn, s)
	}
	if got := pgtest.Rows[string](t, db, `select subject || ' ' || change from postern.journal`); len(got) > 0 {
		t.Errorf("entries: %q", got)
	}
}
