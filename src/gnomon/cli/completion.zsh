#compdef gnomon
# Completions of gnomon for zsh, written by `gnomon completion zsh`.
_gnomon_arguments() {
    # $1: words, $2: settings, of the verb
    local presets=@presets@
    if [[ $PREFIX == algorithm=* ]]; then
        compset -P '*='
        compadd -- ${=presets}
        return
    fi
    compadd -- ${=1}
    compadd -S '=' -- ${=2}
    _files
}
_gnomon() {
    local -a verbs
    verbs=(
@verbs@
    )
    if ((CURRENT == 2)); then
        _describe verb verbs
        return
    fi
    local verb=$words[2]
    shift words
    ((CURRENT--))
    case $verb in
@cases@
    esac
}
if [[ $funcstack[1] == _gnomon ]]; then _gnomon "$@"; else compdef _gnomon gnomon; fi
