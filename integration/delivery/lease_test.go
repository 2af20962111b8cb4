package delivery

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// settled waits until no delivery is pending and none has a lease.
func settled(t testing.TB, db *pgtest.Database) {
	t.Helper()
	pgtest.Eventually(t, 90*time.Second, "no delivery is pending", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending' or claim_id is not null`) == 0
	})
}

// same fails the test unless every request for a message had the same bytes
// and a signature of its own time.
func same(t testing.TB, rcv *receiver.Receiver, id string) {
	t.Helper()
	requests := rcv.Of(id)
	for _, r := range requests {
		if r.Sum != requests[0].Sum || r.ID != id {
			t.Errorf("message %s was sent with other bytes or another id", id)
		}
		verify(t, r)
	}
}

// A process killed during its POST leaves a lease that runs out, and nothing
// else: no flag for ever, no second delivery before that.
func TestKilledDuringThePost(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.Sequence(gate.Then(receiver.Status(200)), receiver.Status(200)))
	first := fleet.Spawn(t, db)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	claimed := pgtest.Scan[time.Time](t, db, `select leased_until - interval '3 s' from postern.delivery`)
	first.Kill()
	fleet.Spawn(t, db)
	pgtest.Eventually(t, time.Minute, "it is delivered", hasStatus(t, db, id, "delivered"))
	gate.Open()
	if n := rcv.N(id); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
	second := pgtest.Scan[time.Time](t, db, `select started_at from postern.attempt`)
	if waited := second.Sub(claimed); waited < 3*time.Second {
		t.Errorf("claimed again after %v, before its lease of 3 s was past", waited)
	}
	if n := fate(t, db, id).Attempts; n != 2 {
		t.Errorf("attempt %d, want 2: the lost one counts", n)
	}
	same(t, rcv, id)
}

// The last attempt is lost with its process: the delivery does not rest.
func TestKilledDuringTheLastAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Hang)
	p := fleet.Spawn(t, db, "POSTERN_MAX_ATTEMPTS=1")
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	p.Kill()
	fleet.Spawn(t, db, "POSTERN_MAX_ATTEMPTS=1")
	pgtest.Eventually(t, time.Minute, "it is dead", hasStatus(t, db, id, "dead"))
	if got := fate(t, db, id); *got.Reason != "outcome of the last attempt unknown" || rcv.N(id) != 1 || got.Attempts != 1 {
		t.Errorf("%d requests, %d attempts, reason %q", rcv.N(id), got.Attempts, *got.Reason)
	}
}

// Somebody lowers max_attempts below what a delivery has used up. It dies of
// that, with its last answer still there to be read: nothing about it is
// unknown.
func TestMaxAttemptsAreLowered(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(307, "Location: /elsewhere", "Retry-After: 2"))
	first := fleet.Start(t, fleet.Config(t, db))
	id := insert(t, db, rcv.URL, `{"a":1}`)
	pgtest.Eventually(t, time.Minute, "it waits for its second attempt", func() bool { return fate(t, db, id).LastStatus != nil })
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	config := fleet.Config(t, db)
	config.MaxAttempts = 1
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "it is dead", hasStatus(t, db, id, "dead"))
	got := fate(t, db, id)
	if *got.Reason != "max_attempts" || got.Attempts != 1 || rcv.N(id) != 1 {
		t.Errorf("%d requests, %d attempts, reason %q", rcv.N(id), got.Attempts, *got.Reason)
	}
	if got.LastStatus == nil || *got.LastStatus != 307 || got.LastError == nil || !strings.Contains(*got.LastError, "redirect") {
		t.Errorf("its last answer is gone: %+v", got)
	}
}

// Slow and quick receivers share a process with room for one request: a lease
// begins with the request it is for, so none runs out in a queue.
func TestLeaseCoversOnePost(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	slow := receiver.New(t, receiver.Delay(700*time.Millisecond, receiver.Status(200)))
	quick := receiver.New(t, receiver.Status(200))
	for range 2 {
		config := fleet.Config(t, db)
		config.Slots = 1
		config.Timeout = 5 * time.Second
		config.LeaseMargin = 500 * time.Millisecond
		fleet.Start(t, config)
	}
	for range 5 {
		insert(t, db, slow.URL, `{"a":1}`)
	}
	for range 5 {
		insert(t, db, quick.URL, `{"a":1}`)
	}
	settled(t, db)
	for _, rcv := range []*receiver.Receiver{slow, quick} {
		if rcv.Count() != 5 {
			t.Errorf("%d requests, want 5", rcv.Count())
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where number <> 1`); n != 0 {
		t.Errorf("%d attempts were not the first", n)
	}
}

// The database refuses the first two writes of a result. The request is not
// made again for that, and attempts are counted.
func TestRecordingFailsForAWhile(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`create sequence public.refusals;
		create function refuse_twice() returns trigger language plpgsql as $$
		begin
		  if nextval('public.refusals') <= 2 then raise exception 'not now'; end if;
		  return new;
		end $$;
		create trigger refuse_twice before update on postern.delivery
		for each row when (new.last_status is distinct from old.last_status) execute function refuse_twice()`)
	rcv := receiver.New(t, receiver.Status(403))
	fleet.Start(t, fleet.Config(t, db))
	id := insert(t, db, rcv.URL, `{"a":1}`)
	pgtest.Eventually(t, time.Minute, "it is dead", hasStatus(t, db, id, "dead"))
	got := fate(t, db, id)
	if rcv.N(id) > 4+2 || got.Attempts != 4 || *got.LastStatus != 403 {
		t.Errorf("%d requests and %+v", rcv.N(id), got)
	}
}

// One outcome among many cannot be stored, for whatever reason. The others are,
// and none of their requests is made again.
func TestOneOutcomeCannotBeStored(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`
		create function refuse() returns trigger language plpgsql as $$ begin raise exception 'never'; end $$;
		create trigger refuse before insert on postern.attempt for each row when (new.response = 'poison') execute function refuse()`)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.ByID(map[string]receiver.Script{"poison": receiver.Body(200, "poison")}, receiver.Status(200))))
	config := fleet.Config(t, db)
	config.Batch = 100
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	for _, id := range []string{"a", "b", "poison", "c", "d"} {
		db.Exec(`insert into postern.outbox (message_id, event_type, payload, target_url) values ($1, 'a', '1', $2)`, id, rcv.URL)
	}
	rcv.Wait(5, time.Minute)
	gate.Open()
	pgtest.Eventually(t, time.Minute, "the others are recorded", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt`) == 4
	})
	left := pgtest.Scan[string](t, db, `select message_id from postern.delivery d join postern.outbox o on o.id = d.outbox_id`)
	if left != "poison" || rcv.Count() != 5 {
		t.Errorf("%s is left after %d requests", left, rcv.Count())
	}
	db.Exec(`drop trigger refuse on postern.attempt; update postern.delivery set leased_until = now() - interval '1 s'`)
	settled(t, db)
	if n := rcv.Count() - rcv.N("poison"); n != 4 {
		t.Errorf("%d requests for the others, want 4", n)
	}
}

// Nothing can be recorded for longer than leases last, by a process that knows
// the outcomes of more requests than it can write at once. Before they are
// written it claims nothing, or it would make the same requests again.
func TestKnownOutcomesGoBeforeClaims(t *testing.T) {
	t.Parallel()
	const n = 50
	db := pgtest.DB(t)
	db.Exec(`
		create sequence public.refusals;
		create function refuse() returns trigger language plpgsql as $$ begin perform nextval('public.refusals'); raise exception sqlstate '57014'; end $$;
		create trigger refuse before insert on postern.attempt for each statement execute function refuse()`)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Slots, config.Batch = 250, 5
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', $1 from generate_series(1, $2::int)`, rcv.URL, n)
	rcv.Wait(n, time.Minute)
	gate.Open()
	pgtest.Eventually(t, time.Minute, "all is answered", func() bool { return rcv.InFlight() == 0 })
	pgtest.Eventually(t, time.Minute, "its recorders were refused", func() bool {
		return pgtest.Scan[int](t, db, `select last_value::int from public.refusals`) >= 4
	})
	db.Exec(`update postern.delivery set leased_until = now() - interval '1 s'`)
	lapsed := time.Now()
	pgtest.Eventually(t, time.Minute, "two polls' time has passed", func() bool { return time.Since(lapsed) > 2*time.Second })
	db.Exec(`drop trigger refuse on postern.attempt`)
	settled(t, db)
	if rcv.Count() != n {
		t.Errorf("%d requests for %d messages", rcv.Count(), n)
	}
}

// When to try next is in the row, not in the processes: six of them wait as
// long as one.
func TestRetryClockIsNotMultiplied(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(500, "Retry-After: 2"))
	for range 6 {
		config := fleet.Config(t, db)
		config.MaxAttempts = 3
		fleet.Start(t, config)
	}
	id := insert(t, db, rcv.URL, `{"a":1}`)
	pgtest.Eventually(t, time.Minute, "it is dead", hasStatus(t, db, id, "dead"))
	requests := rcv.Of(id)
	if len(requests) != 3 {
		t.Fatalf("%d requests, want 3", len(requests))
	}
	for i := 1; i < len(requests); i++ {
		if gap := requests[i].Arrived.Sub(requests[i-1].Arrived); gap < 1990*time.Millisecond {
			t.Errorf("requests %v apart, asked for 2 s", gap)
		}
	}
}

// The receiver has said 200 and the process dies before the row says so: the
// duplicate cannot be avoided, and can be dropped.
func TestKilledBetweenAnswerAndRecord(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`
		create function refuse() returns trigger language plpgsql as $$
		begin raise exception sqlstate '57014'; end $$;
		create trigger refuse before insert on postern.attempt for each statement execute function refuse()`)
	rcv := receiver.New(t, receiver.Status(200))
	p := fleet.Spawn(t, db)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	p.Kill()
	db.Exec(`drop trigger refuse on postern.attempt`)
	fleet.Spawn(t, db)
	pgtest.Eventually(t, time.Minute, "it is delivered", hasStatus(t, db, id, "delivered"))
	if n := rcv.N(id); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
	same(t, rcv, id)
}

// A dispatcher that was frozen beyond its lease finds when it goes on that its
// claim has another owner, and changes nothing of that.
func TestFrozenBeyondItsLease(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	second := receiver.NewGate()
	rcv := receiver.New(t, receiver.Sequence(
		receiver.Delay(300*time.Millisecond, receiver.Status(500)),
		second.Then(receiver.Status(200))))
	frozen := fleet.Spawn(t, db)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	frozen.Signal(syscall.SIGSTOP)
	fleet.Spawn(t, db, "POSTERN_TIMEOUT=30s", "POSTERN_LEASE=45s")
	rcv.Wait(2, time.Minute)
	owner := pgtest.Scan[int64](t, db, `select claim_id from postern.delivery`)
	frozen.Signal(syscall.SIGCONT)
	pgtest.Eventually(t, time.Minute, "the late failure is in the log", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt where outcome = 'retry'`) == 1
	})
	if now := pgtest.Scan[int64](t, db, `select coalesce(max(claim_id), 0) from postern.delivery`); now != owner {
		t.Errorf("the late failure took the claim %d from its owner; it is %d", owner, now)
	}
	second.Open()
	pgtest.Eventually(t, time.Minute, "it is delivered", hasStatus(t, db, id, "delivered"))
	if n := rcv.N(id); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
}

// A success that comes late, after the delivery was cancelled or claimed by
// another, still finishes it: the receiver has the message.
func TestLateSuccess(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	db.Exec(`update postern.delivery set status = 'cancelled', leased_until = null, claim_id = null, claimed_by = null`)
	gate.Open()
	pgtest.Eventually(t, time.Minute, "it is delivered", hasStatus(t, db, id, "delivered"))
}

func TestLateFailureChangesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(500)))
	config := fleet.Config(t, db)
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	db.Exec(`update postern.delivery set status = 'cancelled', leased_until = null, claim_id = null, claimed_by = null`)
	gate.Open()
	pgtest.Eventually(t, time.Minute, "the attempt is logged", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt`) == 1
	})
	if got := fate(t, db, id); got.Status != "cancelled" || got.LastStatus != nil {
		t.Errorf("the cancelled delivery became %+v", got)
	}
}

// A lease is ended by hand while its request is out, and the same process claims
// the delivery again. What comes of the first request is
// not taken for what comes of the second.
func TestClaimedAgainByTheSameProcess(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	first, second := receiver.NewGate(), receiver.NewGate()
	rcv := receiver.New(t, receiver.Sequence(first.Then(receiver.Status(500)), second.Then(receiver.Status(200))))
	config := fleet.Config(t, db)
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	db.Exec(`update postern.delivery set leased_until = null, claim_id = null, claimed_by = null, next_attempt_at = now()`)
	rcv.Wait(2, time.Minute)
	owner := pgtest.Scan[int64](t, db, `select claim_id from postern.delivery`)
	first.Open()
	pgtest.Eventually(t, time.Minute, "the late failure is in the log", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt where outcome = 'retry'`) == 1
	})
	if now := pgtest.Scan[int64](t, db, `select coalesce(max(claim_id), 0) from postern.delivery`); now != owner {
		t.Errorf("the late failure took the claim %d from its owner; it is %d", owner, now)
	}
	second.Open()
	pgtest.Eventually(t, time.Minute, "it is delivered", hasStatus(t, db, id, "delivered"))
	if n := rcv.N(id); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
}

// The server crashes before a claim, which does not wait for the disk, is safe
// there: the number of the claim is given out again, to whoever claims the
// delivery next. A failure of the lost claim changes nothing of that one's.
func TestNumberOfALostClaimIsGivenOutAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(500)))
	config := fleet.Config(t, db)
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	insert(t, db, rcv.URL, `{"a":1}`)
	rcv.Wait(1, time.Minute)
	type owner struct {
		ClaimID, ClaimedBy int64
		Attempts           int
		LeasedUntil        time.Time
	}
	const read = `select claim_id, claimed_by, attempts, leased_until from postern.delivery`
	db.Exec(`update postern.delivery set claimed_by = claimed_by + 1, leased_until = now() + interval '1 hour'`)
	before := pgtest.Scan[owner](t, db, read)
	gate.Open()
	pgtest.Eventually(t, time.Minute, "the attempt is logged", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt`) == 1
	})
	if after := pgtest.Scan[owner](t, db, read); after != before {
		t.Errorf("the claim %+v of another became %+v", before, after)
	}
}

// A message that was deleted by hand makes its delivery dead, not stuck.
func TestMessageDeletedByHand(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	insert(t, db, "http://127.0.0.1:9", `{"a":1}`)
	db.Exec(`delete from postern.outbox`)
	fleet.Start(t, fleet.Config(t, db))
	pgtest.Eventually(t, time.Minute, "its delivery is dead", func() bool {
		return pgtest.Scan[string](t, db, `select status || ' ' || coalesce(reason, '') from postern.delivery`) == "dead message_deleted"
	})
}

func TestExpiry(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	id := pgtest.Scan[string](t, db, `
		insert into postern.outbox (event_type, payload, target_url, expires_at)
		values ('a', '1', $1, now() - interval '1 s') returning message_id`, rcv.URL)
	fleet.Start(t, fleet.Config(t, db))
	pgtest.Eventually(t, time.Minute, "it is dead", hasStatus(t, db, id, "dead"))
	if got := fate(t, db, id); *got.Reason != "expired" || rcv.Count() != 0 {
		t.Errorf("%d requests, %+v", rcv.Count(), got)
	}
}

// More messages than one look takes expire at the same moment, behind a door
// that is shut. One of them is locked, which holds up none of the others.
func TestExpiryOfManyAtOneMoment(t *testing.T) {
	t.Parallel()
	const n = 5_200
	db := pgtest.DB(t)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url, expires_at)
		select 'a', '1', 'https://h.example/', now() - interval '1 day' from generate_series(1, $1::int)`, n)
	db.Exec(`select postern.pause('https://h.example')`)
	release := hold(t, db, `select from postern.delivery where id = (select min(id) from postern.delivery) for update`)
	defer release()
	fleet.Start(t, fleet.Config(t, db))
	pgtest.Eventually(t, time.Minute, "all but the locked one are dead", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where reason = 'expired'`) == n-1
	})
}

// Dispatchers are killed about once a second while several writers commit and
// roll back. What was committed arrives; what comes twice was in flight at a
// kill.
func TestKillStorm(t *testing.T) {
	t.Parallel()
	storm(t, 4000, 6*time.Second)
}

// storm spreads that many transactions over that time.
func storm(t *testing.T, transactions int, lasts time.Duration) {
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Delay(5*time.Millisecond, receiver.Status(200)), receiver.Keeping(receiver.Hashes))
	// No second request only because the machine is busy.
	settings := []string{"POSTERN_SLOTS=32", "POSTERN_BATCH=50", "POSTERN_MAX_ATTEMPTS=50", "POSTERN_TIMEOUT=8s", "POSTERN_LEASE=10s"}
	running := []*fleet.Process{fleet.Spawn(t, db, settings...), fleet.Spawn(t, db, settings...)}

	began := time.Now()
	committed := commitHalf(t, db, rcv.URL, transactions, lasts)
	var ids map[string]bool
	atRisk := map[string]int{}
	kills, held := 0, 0
	for ; ids == nil; kills++ {
		select {
		case <-time.After(time.Second): // the pace of the storm, not a wait for anything
		case ids = <-committed:
		}
		victim := kills % len(running)
		running[victim].Kill()
		for _, id := range heldBy(t, db, running[victim]) {
			atRisk[id]++
			held++
		}
		running[victim] = fleet.Spawn(t, db, settings...)
	}
	wrote := time.Since(began)
	settled(t, db)
	n, duplicates := len(ids), 0
	for id, times := range rcv.IDs() {
		if !ids[id] {
			t.Errorf("%s was never committed", id)
		}
		if times-1 > atRisk[id] {
			t.Errorf("%s came %d times and was in flight at %d kills", id, times, atRisk[id])
		}
		duplicates += times - 1
		delete(ids, id)
	}
	if len(ids) > 0 {
		t.Errorf("%d committed messages never came", len(ids))
	}
	sameBytes(t, rcv)
	t.Logf("%d transactions in %v, %d of them committed; %d kills, %d deliveries in flight at one; %d requests, %d of them duplicates; all was delivered %v after the last commit",
		transactions, wrote.Round(time.Second), n, kills, held, rcv.Count(), duplicates, time.Since(began.Add(wrote)).Round(time.Second))
}

// commitHalf has eight writers, each with a connection of its own, spread that
// many transactions over that time; every second one is rolled back. It sends
// the ids that were committed when all are through.
func commitHalf(t *testing.T, db *pgtest.Database, url string, transactions int, lasts time.Duration) <-chan map[string]bool {
	const writers = 8
	each := transactions / writers
	ids := make(chan []string, writers)
	for w := range writers {
		conn := db.Connect()
		go func() {
			var mine []string
			defer func() { ids <- mine }()
			pace := time.NewTicker(lasts / time.Duration(each))
			defer pace.Stop()
			for i := range each {
				<-pace.C
				id, err := write(t.Context(), conn, url, fmt.Sprintf(`{"writer":%d,"n":%d}`, w, i), i%2 == 0)
				if err != nil {
					t.Error(err)
					return
				}
				if i%2 == 0 {
					mine = append(mine, id)
				}
			}
		}()
	}
	all := make(chan map[string]bool)
	go func() {
		committed := map[string]bool{}
		for range writers {
			for _, id := range <-ids {
				committed[id] = true
			}
		}
		all <- committed
	}()
	return all
}

// heldBy returns the messages whose deliveries a killed process had claimed.
func heldBy(t testing.TB, db *pgtest.Database, p *fleet.Process) []string {
	t.Helper()
	return pgtest.Rows[string](t, db, `
		select o.message_id
		  from postern.delivery d
		  join postern.outbox o on o.id = d.outbox_id
		 where d.claimed_by = (select max(id) from postern.dispatcher where pid = $1)`, p.Pid())
}

// sameBytes fails the test unless all requests for a message had the same body.
func sameBytes(t testing.TB, rcv *receiver.Receiver) {
	t.Helper()
	sums := map[string][32]byte{}
	for _, r := range rcv.Requests() {
		if sum, ok := sums[r.ID]; ok && sum != r.Sum {
			t.Errorf("message %s was sent with other bytes", r.ID)
		}
		sums[r.ID] = r.Sum
	}
}

// Four dispatchers drain one backlog without faults: each message once.
func TestFourDispatchersDrainExactlyOnce(t *testing.T) {
	t.Parallel()
	drain(t, 20_000)
}

func drain(t *testing.T, n int) {
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
	db.Exec(`insert into postern.outbox (event_type, payload, target_url)
		select 'a', i::text, $1 from generate_series(1, $2::int) i`, rcv.URL, n)
	began := time.Now()
	for range 4 {
		config := fleet.Config(t, db)
		config.Batch = 100
		config.LeaseMargin = time.Minute
		config.Timeout = 30 * time.Second
		fleet.Start(t, config)
	}
	rcv.Wait(n, 10*time.Minute)
	settled(t, db)
	t.Logf("%d requests for %d messages in %v", rcv.Count(), len(rcv.IDs()), time.Since(began).Round(time.Second))
	if rcv.Count() != n || len(rcv.IDs()) != n {
		t.Errorf("%d requests for %d messages, want %d", rcv.Count(), len(rcv.IDs()), n)
	}
}
