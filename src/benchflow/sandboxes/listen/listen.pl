# Listens on loopback ports inside a sandbox; says and does what listen.py does.
use strict;
use Socket qw(:DEFAULT IPPROTO_TCP TCP_NODELAY);
use IO::Handle;

my ($HEAD, $CHUNK, $WINDOW, $MOST) = (9, 1 << 15, 1 << 18, 128);
my (%ends, %remotes, %listeners);
my ($count, $read) = (0, '');
$SIG{PIPE} = 'IGNORE';

sub tell_engine {    # blocks: the engine always reads
    my ($kind, $number, $value, $data) = @_;
    my $left = pack('aNN', $kind, $number || 0, $value || 0) . ($data // '');
    while (length $left) {
        my $size = syswrite(STDOUT, $left) // exit 1;
        substr($left, 0, $size, '');
    }
}

# An end is one socket: what it reads goes to its `other`, or, without one, to the engine.
sub new_end {
    my ($socket) = @_;
    $socket->blocking(0);
    my $end = { socket => $socket, fd => fileno($socket), out => '', reading => 1, taken => 0 };
    return $ends{ $end->{fd} } = $end;
}

sub room {    # how much an end may read now
    my ($end) = @_;
    return length($end->{other}{out}) < $WINDOW ? $CHUNK : 0 if $end->{other};
    return $end->{credit} < $CHUNK ? $end->{credit} : $CHUNK;
}

sub drop {
    my ($end, $failed) = @_;
    return unless delete $ends{ $end->{fd} };
    close $end->{socket};
    if (my $other = delete $end->{other}) {
        drop($other, 1) if $failed;
    } elsif ($end->{number} && delete $remotes{ $end->{number} }) {
        tell_engine('X', $end->{number}) if $failed;
    }
}

sub flush_end {
    my ($end) = @_;
    while (length $end->{out} && !$end->{ended}) {
        my $size = syswrite($end->{socket}, $end->{out});
        if (!defined $size) {
            return if $!{EAGAIN} || $!{EINTR};
            drop($end, 1) unless $end->{server};
            $end->{ended} = 1;
            last;
        }
        substr($end->{out}, 0, $size, '');
        next unless $end->{number};
        $end->{taken} += $size;
        if ($end->{taken} >= $WINDOW / 2) {
            tell_engine('W', $end->{number}, $end->{taken});
            $end->{taken} = 0;
        }
    }
    $end->{out} = '' if $end->{ended};    # it reads no more, but a server may be answering
    if ($end->{ending} && !$end->{ended}) {
        $end->{ended} = 1;
        shutdown($end->{socket}, 1);
    }
}

sub read_end {
    my ($end) = @_;
    my $room = $end->{reading} ? room($end) : 0;
    return unless $room;
    my $size = sysread($end->{socket}, my $data, $room);
    if (!defined $size) {
        return if $!{EAGAIN} || $!{EINTR};
        return drop($end, 1) unless $end->{server};
        $size = 0;
    }
    if (my $other = $end->{other}) {
        $size ? ($other->{out} .= $data) : ($other->{ending} = 1);
        $end->{reading} = 0 unless $size;
        flush_end($other);
    } elsif ($size) {
        $end->{credit} -= $size;
        tell_engine('D', $end->{number}, $size, $data);
    } else {
        $end->{reading} = 0;
        tell_engine('E', $end->{number});
    }
}

sub accept_one {
    my ($listener, $port, $target) = @_;
    accept(my $client, $listener) or return;
    setsockopt($client, IPPROTO_TCP, TCP_NODELAY, 1);
    if ($target eq '-') {
        my $end = new_end($client);
        $end->{number} = ++$count;
        $end->{credit} = $WINDOW;
        $remotes{$count} = $end;
        tell_engine('O', $count, $port);
        return;
    }
    my ($far, $done);
    if ($target =~ m{^/}) {
        $done = socket($far, PF_UNIX, SOCK_STREAM, 0) && connect($far, sockaddr_un($target));
    } else {
        my ($host, $number) = $target =~ /^(.*):(\d+)$/;
        $done = socket($far, PF_INET, SOCK_STREAM, 0)
            && connect($far, sockaddr_in($number, inet_aton($host)));
    }
    return unless $done;
    my ($one, $other) = (new_end($client), new_end($far));
    ($one->{other}, $other->{other}, $other->{server}) = ($other, $one, 1);
}

sub take_frames {
    while (length $read >= $HEAD) {
        my ($kind, $number, $value) = unpack('aNN', $read);
        my $size = $HEAD + ($kind eq 'D' ? $value : 0);
        return if length $read < $size;
        my $frame = substr($read, 0, $size, '');
        my $end = $remotes{$number} or next;
        if ($kind eq 'D') {
            $end->{out} .= substr($frame, $HEAD);
            flush_end($end);
        } elsif ($kind eq 'E') {
            $end->{ending} = 1;
            flush_end($end);
        } elsif ($kind eq 'W') {
            $end->{credit} += $value;
        } else {
            drop($end, 0);
        }
    }
}

for (@ARGV) {
    my ($port, $target) = split /=/, $_, 2;
    socket(my $listener, PF_INET, SOCK_STREAM, 0) or die "socket: $!\n";
    setsockopt($listener, SOL_SOCKET, SO_REUSEADDR, 1);
    bind($listener, sockaddr_in($port, INADDR_LOOPBACK)) or die "port $port: $!\n";
    listen($listener, 256) or die "port $port: $!\n";
    $listener->blocking(0);
    $listeners{ fileno $listener } = [$listener, $port, $target];
}
tell_engine('R');
while (1) {
    my ($in, $out) = ('', '');
    vec($in, 0, 1) = 1;
    if (keys %ends < 2 * $MOST) { vec($in, $_, 1) = 1 for keys %listeners }
    for my $end (values %ends) {
        vec($in, $end->{fd}, 1) = 1 if $end->{reading} && room($end);
        vec($out, $end->{fd}, 1) = 1 if length $end->{out};
    }
    next if select($in, $out, undef, undef) < 0;
    if (vec($in, 0, 1)) {
        exit 0 unless sysread(STDIN, $read, 1 << 16, length $read);
        take_frames();
    }
    for my $fd (keys %listeners) { accept_one(@{ $listeners{$fd} }) if vec($in, $fd, 1) }
    for my $end (my @now = values %ends) {
        next if ($ends{ $end->{fd} } // 0) != $end;
        flush_end($end) if vec($out, $end->{fd}, 1);
        read_end($end) if vec($in, $end->{fd}, 1) && $ends{ $end->{fd} };
        drop($end, 0) if !$end->{reading} && $end->{ended};
    }
}
