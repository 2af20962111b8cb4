package dispatcher

import (
	"strings"
	"sync"
	"time"
)

// What one process stores of one destination's answers: at once quotaAtOnce, and
// quotaPerHour for each hour since. Of answers beyond it the first quotaBeyond
// bytes are stored; as much is free, so that short answers use up nothing.
const (
	quotaAtOnce  = 256 << 10
	quotaPerHour = 64 << 10
	quotaBeyond  = 256
)

// answerQuota bounds what destinations write into our log of attempts. A receiver
// that answers every request with 16 KiB of noise would otherwise cost 17 KB a
// delivery until retention removes it. Safe for concurrent use.
type answerQuota struct {
	mu   sync.Mutex
	used map[string]quotaUse
}

// quotaUse is how many bytes were in use at a time; they lapse at quotaPerHour.
type quotaUse struct {
	bytes float64
	at    time.Time
}

// maxQuotas bounds the destinations that are remembered; it begins anew when
// full.
const maxQuotas = 10_000

// trim returns what is stored of an answer.
func (q *answerQuota) trim(destination, answer string, now time.Time) string {
	if len(answer) <= quotaBeyond {
		return answer
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	use := q.used[destination]
	left := max(0, use.bytes-now.Sub(use.at).Hours()*quotaPerHour) + float64(len(answer))
	if left > quotaAtOnce {
		return strings.ToValidUTF8(answer[:quotaBeyond], "") // without half a character
	}
	if q.used == nil || len(q.used) >= maxQuotas {
		q.used = map[string]quotaUse{}
	}
	q.used[destination] = quotaUse{left, now}
	return answer
}
